//! The checked-in code of the hand protocol is what its `.proto` file generates. `UPDATE=1` rewrites it.

use std::path::Path;

#[test]
fn generated_code_matches_the_proto_file() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = std::env::temp_dir().join(format!("tendon-drift-{}", std::process::id()));
    std::fs::create_dir_all(&out).unwrap();
    let descriptors = protox::compile(["hand.proto"], [here.join("proto")]).unwrap();
    tonic_prost_build::configure()
        .build_transport(false)
        .emit_rerun_if_changed(false)
        .bytes(".")
        .out_dir(&out)
        .compile_fds(descriptors)
        .unwrap();
    let fresh = std::fs::read_to_string(out.join("tendon.hand.v1.rs")).unwrap();
    std::fs::remove_dir_all(&out).unwrap();

    let kept_path = here.join("src/gen/tendon.hand.v1.rs");
    #[expect(clippy::disallowed_methods, reason = "the switch that rewrites the file")]
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&kept_path, &fresh).unwrap();
    }
    let kept = std::fs::read_to_string(&kept_path).unwrap_or_default();
    assert!(
        kept == fresh,
        "{} is out of date: run UPDATE=1 cargo test -p proto --features hand",
        kept_path.display()
    );
}
