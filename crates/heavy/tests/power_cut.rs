//! The power goes while the runner works: from every image that the disk may be left with, the runner comes up again with
//! everything that it had acknowledged, the audit's rows included.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use heavy::acks::lost;
use heavy::disk::Disk;
use heavy::mount::{LoopDevice, Mounted};
use heavy::random::Random;
use heavy::tendon::Tendon;
use heavy::workload::Workload;
use testkit::process::{command, run};
use testkit::{Need, have_all, private_mounts, temp_dir};

/// The disk's size.
const SIZE: usize = 768 << 20;
/// How many images are checked; `HEAVY_IMAGES` raises it.
const IMAGES: usize = 8;
/// How long the workload runs; `HEAVY_SECONDS` raises it.
const SECONDS: usize = 8;
/// What the runner reads to learn whether the machine was started anew.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[test]
fn nothing_acknowledged_is_lost_when_the_power_goes() {
    if !have_all(&[Need::Root, Need::Loop, Need::Fuse, Need::Bwrap, Need::Git]) {
        return;
    }
    private_mounts("nothing_acknowledged_is_lost_when_the_power_goes", || {
        let seed = Random::seed();
        let mut random = Random::new(seed);
        let dir = temp_dir("power");
        let place = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).expect("mkdir");
            path
        };
        let (fuse, place, check) = (place("fuse"), place("mounted"), place("check"));
        let boot = dir.path().join("boot_id");
        std::fs::write(&boot, "11111111-1111-4111-8111-111111111111\n").expect("write");
        run(command("mount").arg("--bind").arg(&boot).arg(BOOT_ID));

        let disk = Disk::mount(&fuse, SIZE).expect("the disk is mounted");
        let device = LoopDevice::attach(disk.file()).expect("a loop device");
        run(command("mkfs.ext4").args(["-q", "-E", "nodiscard"]).arg(device.path()));
        let mounted = Mounted::new(device.path(), &place);
        let tendon = Tendon::new(&place.join("state"));
        let runner = tendon.start_runner();
        let workload = Workload::new(&tendon, &dir.path().join("repo"), seed);
        let first = disk.position();
        let seconds = heavy::count("HEAVY_SECONDS", SECONDS) as u64;
        workload.run(Duration::from_secs(seconds), &AtomicBool::new(false), &|| disk.position());
        let last = disk.position();
        runner.kill();
        drop(mounted);
        drop(device);
        assert!(workload.acks.len() > 20, "the workload did next to nothing: {}", workload.acks.len());

        let mut replay = disk.into_replay();
        let images = heavy::count("HEAVY_IMAGES", IMAGES);
        let mut points: Vec<usize> = (0..images).map(|_| first + random.below(last - first)).collect();
        points.sort_unstable();
        points.dedup();
        std::fs::write(&boot, "22222222-2222-4222-8222-222222222222\n").expect("write");
        for point in points {
            // A file of its own each time: a loop device that is still going away would show the old one's pages.
            let image = dir.path().join(format!("image-{point}"));
            let blocks = replay.crash(point, &mut random, &image).expect("an image");
            let acks = workload.acks.until(point);
            let context = format!(
                "seed {seed}, cut after write {point} of {last}, {blocks} blocks lost, {} acks",
                acks.len()
            );
            report(&context);
            examine(&context, &image, &check, &acks);
            std::fs::remove_file(&image).expect("unlink");
        }
    });
}

#[expect(clippy::print_stderr, reason = "what was tested, for who reads the log")]
fn report(context: &str) {
    eprintln!("{context}");
}

/// Mounts an image as the next boot would, starts the runner on it, and asks for everything that was acknowledged.
fn examine(context: &str, image: &Path, check: &Path, acks: &[heavy::acks::Ack]) {
    let _mounted = Mounted::image(image, check);
    let tendon = Tendon::new(&check.join("state"));
    let runner = tendon.start_runner();
    let lost = lost(&tendon, acks);
    assert!(lost.is_empty(), "{context}:\n{}\n--- the runner's log\n{}", lost.join("\n"), runner.log());
    runner.kill();
}
