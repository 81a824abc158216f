//! The disk under the power-cut test: what was synced survives every cut, and what was not can be lost.

use std::path::Path;

use heavy::disk::Disk;
use heavy::mount::{LoopDevice, Mounted};
use heavy::random::Random;
use testkit::process::{command, run};
use testkit::{Need, have_all, private_mounts, temp_dir};

const SIZE: usize = 64 << 20;

#[test]
fn synced_files_survive_every_cut_and_others_may_not() {
    if !have_all(&[Need::Root, Need::Loop, Need::Fuse]) {
        return;
    }
    private_mounts("synced_files_survive_every_cut_and_others_may_not", || {
        let dir = temp_dir("disk");
        let place = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        };
        let (fuse, place, check) = (place("fuse"), place("mounted"), place("check"));
        let disk = Disk::mount(&fuse, SIZE).unwrap();
        let device = LoopDevice::attach(disk.file()).unwrap();
        run(command("mkfs.ext4").args(["-q", "-E", "nodiscard"]).arg(device.path()));
        let mounted = Mounted::new(device.path(), &place);

        let mut synced = Vec::new();
        for n in 0..20 {
            let path = place.join(format!("synced-{n}"));
            std::fs::write(&path, format!("content {n}")).unwrap();
            std::fs::File::open(&path).unwrap().sync_all().unwrap();
            synced.push(disk.position());
            std::fs::write(place.join(format!("careless-{n}")), format!("content {n}")).unwrap();
        }
        let end = disk.position();
        drop(mounted);
        drop(device);
        let mut replay = disk.into_replay();

        let mut random = Random::new(7);
        let mut careless_lost = 0;
        for n in [4, 9, 14, 19] {
            let point = if n == 19 { end } else { synced[n] };
            let image = dir.path().join(format!("image-{n}"));
            replay.crash(point, &mut random, &image).unwrap();
            let _mounted = Mounted::image(&image, &check);
            for m in 0..=n {
                assert_eq!(
                    read(&check.join(format!("synced-{m}"))).as_deref(),
                    Some(&*format!("content {m}"))
                );
                careless_lost +=
                    usize::from(read(&check.join(format!("careless-{m}"))) != Some(format!("content {m}")));
            }
        }
        assert!(careless_lost > 0, "a cut that loses nothing tests nothing");
    });
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}
