//! Freezes files that are given inline.

use std::collections::{BTreeMap, HashMap};
use std::fs::{DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use proto::api::BaseInfo;
use proto::path::TreePath;
use proto::units::counted;
use proto::verify::InlineFile;

use super::list::in_git_dir;
use super::{About, Cancel, Draft, FreezeError, seal};
use crate::store::Store;

impl Store {
    /// Freezes files given inline.
    pub fn freeze_files(&self, files: &[InlineFile]) -> Result<BaseInfo, FreezeError> {
        let files = check(files)?;
        let hashes: HashMap<TreePath, blake3::Hash> =
            files.iter().map(|(path, (content, _))| ((*path).clone(), blake3::hash(content))).collect();
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"files\0");
        for (path, (_, executable)) in &files {
            hasher.update(path.as_bytes());
            hasher.update(&[0, u8::from(*executable)]);
            hasher.update(hashes[*path].as_bytes());
        }
        let content = hasher.finalize().to_hex().to_string();
        if let Some(base) = self.lease(&content)? {
            return Ok(base);
        }
        let draft = Draft::new(self, &Cancel::default())?;
        for (path, (content, executable)) in &files {
            write(&draft, path, content, *executable).map_err(FreezeError::Store)?;
        }
        let source = counted(files.len() as u64, "inline file");
        let about = About { content, source, git_head: None, mirror: None, warnings: Vec::new() };
        let how = seal::How { hashes: Some(&hashes), ..seal::How::default() };
        self.keep(&draft, about, &how, &|_| ())
    }
}

type Checked<'a> = BTreeMap<&'a TreePath, (Vec<u8>, bool)>;

fn check(files: &[InlineFile]) -> Result<Checked<'_>, FreezeError> {
    let mut out = Checked::new();
    for file in files {
        let refuse = |problem: String| Err(FreezeError::Inline { path: file.path.clone(), problem });
        if in_git_dir(file.path.as_bytes()) {
            return refuse("lies in a git directory".into());
        }
        let content = match file.content.decode() {
            Ok(content) => content,
            Err(problem) => return refuse(format!("has content that is {problem}")),
        };
        if out.insert(&file.path, (content, file.executable)).is_some() {
            return refuse("is given twice".into());
        }
    }
    for path in out.keys() {
        let mut above = path.parent();
        while let Some(dir) = above {
            if out.contains_key(&dir) {
                let problem = format!("lies below `{dir}`, which is a file");
                return Err(FreezeError::Inline { path: (*path).clone(), problem });
            }
            above = dir.parent();
        }
    }
    Ok(out)
}

fn write(draft: &Draft, path: &TreePath, content: &[u8], executable: bool) -> std::io::Result<()> {
    let at = draft.tree().join(path.as_path());
    if let Some(dir) = at.parent() {
        DirBuilder::new().recursive(true).create(dir)?;
    }
    let mode = if executable { 0o755 } else { 0o644 };
    let mut file = File::options().write(true).create_new(true).mode(mode).open(&at)?;
    // The process's umask must not decide what the tree is.
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode))?;
    file.write_all(content)
}
