//! Landlock: the allow-list of paths that the runner gave, applied to this process and so to all that it starts.

use landlock::{
    ABI, Access, AccessFs, LandlockStatus, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope,
};
use proto::hand::BootConfig;

/// The newest generation whose rights are asked for; older kernels enforce what they know.
const NEWEST: ABI = ABI::V7;

/// Applies the lists and says, for the self-test, what came of it. A kernel without Landlock is not an error here: the
/// runner decides what a hand must have. Neither is a path that does not exist: nothing is allowed there.
pub fn landlock(config: &BootConfig) -> Result<String, RulesetError> {
    if config.read_paths.is_empty() && config.write_paths.is_empty() {
        return Ok("off (no path was given)".into());
    }
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    let lists = [
        (&config.read_paths, AccessFs::from_read(NEWEST)),
        (&config.write_paths, AccessFs::from_all(NEWEST)),
    ];
    for (paths, access) in lists {
        for path in paths {
            let Ok(fd) = PathFd::new(path) else { continue };
            let is_dir = std::fs::metadata(path).is_ok_and(|meta| meta.is_dir());
            let access = if is_dir { access } else { access & AccessFs::from_file(NEWEST) };
            rules = rules.add_rule(PathBeneath::new(fd, access))?;
        }
    }
    let done = rules.restrict_self()?;
    let how = match done.ruleset {
        RulesetStatus::FullyEnforced => "enforced",
        RulesetStatus::PartiallyEnforced => "partly enforced",
        RulesetStatus::NotEnforced => "missing",
    };
    Ok(match done.landlock {
        LandlockStatus::Available { effective_abi, kernel_abi } => {
            format!("{how} (abi {})", kernel_abi.unwrap_or(effective_abi as i32))
        }
        LandlockStatus::NotEnabled => "missing (not enabled at the host's boot)".into(),
        LandlockStatus::NotImplemented => "missing (the host's kernel has none)".into(),
    })
}
