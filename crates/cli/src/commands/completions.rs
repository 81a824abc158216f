//! `tendon completions`: what a shell needs to complete command lines.

use clap::{Args, CommandFactory as _};

use super::{Tendon, usage};
use crate::Outcome;
use crate::output::Output;

/// Print completions for a shell.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  tendon completions bash > ~/.local/share/bash-completion/completions/tendon\n  tendon completions fish > ~/.config/fish/completions/tendon.fish"
)]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: clap_complete::Shell,
}

pub(crate) fn run(args: CompletionsArgs, output: &Output) -> Outcome {
    if output.json {
        return Err(usage("completions are a script, not a record", Some("leave out --json")));
    }
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Tendon::command(), "tendon", &mut text);
    output.raw(&text);
    Ok(0)
}
