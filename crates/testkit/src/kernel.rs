//! Debian's kernel for virtual machines: what a test boots in QEMU. `cargo xtask setup` unpacks its package below the
//! workspace's `target`; it is not installed, as it would become one that this machine may start with.

use std::fs;
use std::path::{Path, PathBuf};

/// The package that depends on the newest one.
pub const PACKAGE: &str = "linux-image-cloud-amd64";

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
    /// The one that was unpacked.
    pub fn find() -> Result<Self, String> {
        let missing = || format!("there is no kernel in {}", dir().display());
        let entries = fs::read_dir(dir().join("boot")).map_err(|_| missing())?;
        let mut names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let version =
            names.find_map(|name| Some(name.strip_prefix("vmlinuz-")?.to_owned())).ok_or_else(missing)?;
        let modules = ["lib/modules", "usr/lib/modules"].map(|lib| dir().join(lib).join(&version));
        let modules = modules.into_iter().find(|dir| dir.exists()).ok_or_else(missing)?;
        let kernel = Kernel { image: dir().join("boot").join(format!("vmlinuz-{version}")), modules };
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

/// Where it is unpacked.
pub fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/kernel")
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
    }
}
