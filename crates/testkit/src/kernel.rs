//! Debian's kernel for virtual machines, as its package lays it out: what a test boots in QEMU.

use std::fs;
use std::path::{Path, PathBuf};

/// How the package names it.
const SUFFIX: &str = "-cloud-amd64";

/// The modules that a guest of ours needs: to reach its disk, and overlayfs.
pub const MODULES: [&str; 3] = ["virtio_mmio", "virtio_blk", "overlay"];

/// A kernel that can be booted, and its modules.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The image.
    pub image: PathBuf,
    /// The directory with `modules.dep`.
    modules: PathBuf,
}

impl Kernel {
    /// The newest of those in `/boot` that this user may read.
    pub fn find() -> Result<Self, String> {
        let entries = fs::read_dir("/boot").map_err(|error| format!("/boot: {error}"))?;
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut versions: Vec<String> =
            names.filter_map(|name| Some(name.strip_prefix("vmlinuz-")?.to_owned())).collect();
        versions.retain(|version| version.ends_with(SUFFIX));
        versions.sort_by_key(|version| numbers(version));
        let version = versions.pop().ok_or_else(|| format!("there is no /boot/vmlinuz-*{SUFFIX}"))?;
        let image = Path::new("/boot").join(format!("vmlinuz-{version}"));
        fs::File::open(&image).map_err(|error| format!("{}: {error}", image.display()))?;
        let kernel = Kernel { image, modules: Path::new("/lib/modules").join(&version) };
        kernel.dependencies().map(|_| kernel)
    }

    /// The files of the named modules with all that they need, in an order in which they can be loaded.
    pub fn module_files(&self, names: &[&str]) -> Result<Vec<PathBuf>, String> {
        let table = self.dependencies()?;
        let mut files: Vec<PathBuf> = Vec::new();
        for name in names {
            let line = table.lines().find(|line| {
                line.split_once(':').is_some_and(|(file, _)| file.ends_with(&format!("/{name}.ko")))
            });
            let line = line.ok_or_else(|| format!("the kernel has no module {name}"))?;
            // The table names what a module needs nearest first.
            for file in line.split([':', ' ']).filter(|part| !part.is_empty()).rev() {
                let path = self.modules.join(file);
                if !files.contains(&path) {
                    files.push(path);
                }
            }
        }
        Ok(files)
    }

    fn dependencies(&self) -> Result<String, String> {
        let path = self.modules.join("modules.dep");
        fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
    }
}

/// A version's numbers, so that 6.1.0-100 comes after 6.1.0-57.
fn numbers(version: &str) -> Vec<u32> {
    version.split(['.', '-']).filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_module_needs_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        let table = "a/virtio.ko: a/virtio_ring.ko\na/virtio_ring.ko:\nb/virtio_blk.ko: a/virtio.ko a/virtio_ring.ko\n";
        fs::write(dir.path().join("modules.dep"), table).unwrap();
        let kernel = Kernel { image: PathBuf::new(), modules: dir.path().to_owned() };
        let files = kernel.module_files(&["virtio", "virtio_blk"]).unwrap();
        let want = ["a/virtio_ring.ko", "a/virtio.ko", "b/virtio_blk.ko"].map(|file| dir.path().join(file));
        assert_eq!(files, want);
        assert!(kernel.module_files(&["blk"]).is_err());
        assert!(numbers("6.1.0-100-cloud-amd64") > numbers("6.1.0-57-cloud-amd64"));
    }
}
