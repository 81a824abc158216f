//! For tests: a store with a base and branches made by hand, mounted by the kernel's own overlayfs.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proto::ids::{BaseId, BranchId, LayerId};
use proto::path::TreePath;
use rusqlite::params;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use crate::audit::{Actor, NewRow, append};
use crate::entries::{self, Class, Entry, Kind, StatId};
use crate::scan::{Layers, ScanReport, Writers, marks};
use crate::walk::Marks;
use crate::{EngineChoice, Store, StoreOptions, SystemClock};

pub(crate) fn path(text: &str) -> TreePath {
    text.parse().unwrap()
}

/// What a test sees at a path: kind, mode, content or target.
pub(crate) type Shown = BTreeMap<TreePath, (Kind, u32, Vec<u8>)>;

pub(crate) struct World {
    pub(crate) store: Store,
    pub(crate) base: BaseId,
    base_layer: LayerId,
    next: u8,
    #[expect(dead_code, reason = "removed when the world ends")]
    dir: tempfile::TempDir,
}

pub(crate) struct Branch {
    pub(crate) id: BranchId,
    mount: Option<OwnedFd>,
    root: PathBuf,
}

impl World {
    /// A base whose tree `fill` makes. Paths below `.git` are git's, all others the tree's.
    pub(crate) fn new(fill: impl FnOnce(&Path)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(SystemClock);
        let options = StoreOptions { engine: EngineChoice::Auto, owner: None, clock };
        let store = Store::open(dir.path(), options).unwrap();
        let base_layer = LayerId::from_random([1; 10]);
        let base = BaseId::from_random([1; 10]);
        let tree = store.inner.layout.base(&base_layer);
        std::fs::create_dir(&tree).unwrap();
        fill(&tree);
        let world = Self { store, base, base_layer, next: 1, dir };
        world.add_layer(&world.base_layer, None, "sealed", "base");
        let write = |tx: &rusqlite::Transaction<'_>| -> Result<(), crate::DbError> {
            tx.execute(
                "INSERT INTO bases VALUES (?1, ?2, 'c', 'test', 't', NULL, 0, 0, '[]', 0)",
                params![world.base.as_str(), world.base_layer.as_str()],
            )?;
            for (path, (kind, mode, bytes)) in shown(&tree) {
                let meta = tree.join(path.as_path()).symlink_metadata().unwrap();
                let content = matches!(kind, Kind::File | Kind::Symlink);
                let git = path.components().any(|part| part == b".git");
                let entry = Entry {
                    kind,
                    class: if git { Class::Git } else { Class::Tree },
                    mode,
                    size: bytes.len() as u64,
                    hash: content.then(|| blake3::hash(&bytes)),
                    kept: true,
                    stat: StatId {
                        ctime_ns: meta.ctime() * 1_000_000_000 + meta.ctime_nsec(),
                        mtime_ns: meta.mtime() * 1_000_000_000 + meta.mtime_nsec(),
                        ino: meta.ino(),
                    },
                };
                entries::put(tx, &world.base_layer, &path, &entry)?;
            }
            Ok(())
        };
        world.store.inner.db.write(write).unwrap();
        world
    }

    /// A store with the base that `freeze` makes in it.
    pub(crate) fn frozen(freeze: impl FnOnce(&Store) -> proto::api::BaseInfo) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(SystemClock);
        let options = StoreOptions { engine: EngineChoice::Auto, owner: None, clock };
        let store = Store::open(dir.path(), options).unwrap();
        let base = freeze(&store).id;
        let layer: String = store
            .inner
            .db
            .read()
            .query_row("SELECT layer FROM bases WHERE id = ?1", [base.as_str()], |row| row.get(0))
            .unwrap();
        Self { store, base, base_layer: layer.parse().unwrap(), next: 1, dir }
    }

    /// The branch's last audit row.
    pub(crate) fn seq(&self, branch: &Branch) -> u64 {
        entries::last_seq(&self.store.inner.db.read(), &branch.id).unwrap()
    }

    fn add_layer(&self, layer: &LayerId, parent: Option<&LayerId>, state: &str, engine: &str) {
        let insert = "INSERT INTO layers VALUES (?1, ?2, ?3, 0, ?4, ?5, 0)";
        let parent = parent.map(LayerId::as_str);
        let row = params![layer.as_str(), parent, self.base.as_str(), state, engine];
        self.store.inner.db.read().execute(insert, row).unwrap();
    }

    fn fresh_layer(&mut self) -> LayerId {
        self.next += 1;
        LayerId::from_random([self.next; 10])
    }

    fn add_branch(&mut self, engine: &str) -> BranchId {
        let layer = self.fresh_layer();
        let id = BranchId::from_random([self.next; 10]);
        self.add_layer(&layer, Some(&self.base_layer.clone()), "open", engine);
        let insert = "INSERT INTO branches VALUES (?1, NULL, ?2, ?3, NULL, NULL, ?4, 0, NULL)";
        let row = params![id.as_str(), self.base.as_str(), layer.as_str(), engine];
        self.store.inner.db.read().execute(insert, row).unwrap();
        let actor = Actor::cli(0);
        let event = NewRow::event(&id, &actor, "create", None);
        self.store.inner.db.write(|tx| append(tx, &self.store.inner.key, 0, &event)).unwrap();
        std::fs::create_dir(self.store.inner.layout.branch(&id)).unwrap();
        id
    }

    /// A mounted overlay branch, or `None` where this process can't mount.
    pub(crate) fn overlay(&mut self) -> Option<Branch> {
        // Also as the root of a user namespace: `unshare -Urm` runs these tests on rootless overlays.
        let namespaced = rustix::process::geteuid().is_root() && marks() == Marks::User;
        if !namespaced && !testkit::have(testkit::Need::Root) {
            return None;
        }
        let id = self.add_branch("overlay");
        let dir = self.store.inner.layout.branch(&id);
        std::fs::create_dir(dir.join("upper")).unwrap();
        std::fs::create_dir(dir.join("work")).unwrap();
        let mut branch = Branch { id, mount: None, root: PathBuf::new() };
        self.mount(&mut branch);
        Some(branch)
    }

    pub(crate) fn mount(&self, branch: &mut Branch) {
        let conn = self.store.inner.db.read();
        let layers = Layers::of(&conn, &branch.id).unwrap().unwrap();
        let layout = &self.store.inner.layout;
        let fs = rustix::mount::fsopen("overlay", FsOpenFlags::empty()).unwrap();
        let set = |key: &str, value: &Path| {
            rustix::mount::fsconfig_set_string(&fs, key, value.to_str().unwrap()).unwrap();
        };
        for layer in &layers.lower {
            let base = layers.lower.last() == Some(layer);
            set("lowerdir+", &if base { layout.base(layer) } else { layout.layer(layer) });
        }
        let dir = layout.branch(&branch.id);
        set("upperdir", &dir.join("upper"));
        set("workdir", &dir.join("work"));
        if marks() == Marks::User {
            rustix::mount::fsconfig_set_flag(&fs, "userxattr").unwrap();
        } else {
            set("redirect_dir", Path::new("on"));
            set("index", Path::new("off"));
            set("metacopy", Path::new("off"));
        }
        rustix::mount::fsconfig_create(&fs).unwrap();
        let mount = rustix::mount::fsmount(&fs, FsMountFlags::empty(), MountAttrFlags::empty()).unwrap();
        branch.root = PathBuf::from(format!("/proc/self/fd/{}", mount.as_raw_fd()));
        branch.mount = Some(mount);
    }

    /// A branch that is a copy of the base's tree.
    pub(crate) fn copy(&mut self) -> Branch {
        let id = self.add_branch("copy");
        let dir = self.store.inner.layout.branch(&id);
        let root = dir.join("tree");
        copy_tree(&self.store.inner.layout.base(&self.base_layer), &root);
        std::fs::write(dir.join("made"), "").unwrap();
        Branch { id, mount: None, root }
    }

    /// Seals the branch's layer and puts a new one over it, as a fork does.
    pub(crate) fn seal(&mut self, branch: &mut Branch) {
        branch.mount = None;
        let layer = self.fresh_layer();
        let old = Layers::of(&self.store.inner.db.read(), &branch.id).unwrap().unwrap().open;
        self.add_layer(&layer, Some(&old), "open", "overlay");
        let set = params![layer.as_str(), branch.id.as_str()];
        self.store.inner.db.read().execute("UPDATE branches SET layer = ?1 WHERE id = ?2", set).unwrap();
        let dir = self.store.inner.layout.branch(&branch.id);
        std::fs::rename(dir.join("upper"), self.store.inner.layout.layer(&old)).unwrap();
        std::fs::remove_dir_all(dir.join("work")).unwrap();
        std::fs::create_dir(dir.join("upper")).unwrap();
        std::fs::create_dir(dir.join("work")).unwrap();
        self.mount(branch);
    }

    pub(crate) fn scan(&self, branch: &Branch) -> ScanReport {
        self.store.scan_locked(&branch.id, &Actor::cli(1), None, Writers::Gone).unwrap()
    }

    /// The report's paths, each with its letter.
    pub(crate) fn changed(&self, branch: &Branch) -> Vec<String> {
        let report = self.scan(branch);
        report.changed.paths.iter().map(|c| format!("{} {}", c.status.letter(), c.path)).collect()
    }

    /// What the database says the branch holds, with content where it is kept.
    pub(crate) fn recorded(&self, branch: &Branch) -> BTreeMap<TreePath, Entry> {
        let conn = self.store.inner.db.read();
        let layers = Layers::of(&conn, &branch.id).unwrap().unwrap();
        entries::merged(&conn, &layers.chain(), None).unwrap()
    }

    /// Asserts that the database says of the branch exactly what its root shows.
    pub(crate) fn check(&self, branch: &Branch) {
        let recorded = self.recorded(branch);
        let shown = shown(&branch.root);
        let said: BTreeMap<_, _> =
            recorded.iter().map(|(path, entry)| (path, (entry.kind, entry.mode, entry.hash))).collect();
        let seen: BTreeMap<_, _> = shown
            .iter()
            .map(|(path, (kind, mode, bytes))| {
                let content = matches!(kind, Kind::File | Kind::Symlink);
                (path, (*kind, *mode, content.then(|| blake3::hash(bytes))))
            })
            .collect();
        for (path, what) in &seen {
            assert_eq!(said.get(path), Some(what), "{path} is recorded as it is seen");
        }
        for path in said.keys() {
            assert!(seen.contains_key(path), "{path} is recorded and not there");
        }
    }
}

impl Branch {
    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }
    pub(crate) fn write(&self, path: &str, text: &str) {
        let at = self.at(path);
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        std::fs::write(at, text).unwrap();
    }
    pub(crate) fn upper(&self, world: &World) -> PathBuf {
        crate::content::layer_dir(&world.store.inner.layout.branch(&self.id))
    }
}

/// Everything below `root`, read through it.
pub(crate) fn shown(root: &Path) -> Shown {
    let mut out = Shown::new();
    let mut dirs = vec![None];
    while let Some(dir) = dirs.pop() {
        let at = dir.as_ref().map_or_else(|| root.to_owned(), |dir: &TreePath| root.join(dir.as_path()));
        for entry in std::fs::read_dir(at).unwrap() {
            let name = entry.unwrap().file_name();
            let child = dir.as_ref().map_or_else(
                || TreePath::new(name.as_bytes()).unwrap(),
                |dir: &TreePath| dir.join(name.as_bytes()).unwrap(),
            );
            let at = root.join(child.as_path());
            let meta = at.symlink_metadata().unwrap();
            let mode = meta.permissions().mode() & 0o7777;
            let (kind, bytes) = if meta.is_dir() {
                dirs.push(Some(child.clone()));
                (Kind::Dir, Vec::new())
            } else if meta.is_symlink() {
                (Kind::Symlink, std::fs::read_link(&at).unwrap().as_os_str().as_bytes().to_vec())
            } else if meta.is_file() {
                (Kind::File, std::fs::read(&at).unwrap())
            } else {
                (Kind::Other, Vec::new())
            };
            out.insert(child, (kind, mode, bytes));
        }
    }
    out
}

/// The files and symlinks of `shown` that lie outside `.git`, as git knows them.
pub(crate) fn as_git(shown: &Shown) -> BTreeMap<TreePath, (&'static str, Vec<u8>)> {
    let files = shown.iter().filter(|(path, _)| !path.components().any(|part| part == b".git"));
    files
        .filter_map(|(path, (kind, mode, bytes))| {
            let mode = match kind {
                Kind::File if mode & 0o100 != 0 => "100755",
                Kind::File => "100644",
                Kind::Symlink => "120000",
                Kind::Dir | Kind::Other | Kind::Whiteout => return None,
            };
            Some((path.clone(), (mode, bytes.clone())))
        })
        .collect()
}

pub(crate) fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for (path, (kind, mode, bytes)) in shown(from) {
        let (from, to) = (from.join(path.as_path()), to.join(path.as_path()));
        match kind {
            Kind::Dir => std::fs::create_dir(&to).unwrap(),
            Kind::Symlink => {
                std::os::unix::fs::symlink(std::ffi::OsStr::from_bytes(&bytes), &to).unwrap();
                continue;
            }
            Kind::File => {
                std::fs::write(&to, bytes).unwrap();
                let times =
                    std::fs::FileTimes::new().set_modified(from.metadata().unwrap().modified().unwrap());
                File::options().write(true).open(&to).unwrap().set_times(times).unwrap();
            }
            Kind::Other | Kind::Whiteout => continue,
        }
        std::fs::set_permissions(&to, std::fs::Permissions::from_mode(mode)).unwrap();
    }
}
