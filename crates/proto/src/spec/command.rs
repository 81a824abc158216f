//! A command line as text becomes argv. No shell is ever implied, so text that only a shell would understand is refused.

use crate::error::{Code, Coded};

/// The most words of a command.
const WORDS_MAX: usize = 10_000;
/// The most bytes of a command, all words together.
const BYTES_MAX: usize = 1024 * 1024;

/// Why text is not a command.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// Nothing is left to run.
    #[error("the command is empty")]
    Empty,
    /// A quote that never ends, or a backslash at the end.
    #[error("`{0}` has a quote that does not end")]
    Quote(String),
    /// Something that only a shell would act on.
    #[error("`{text}` has {what}, which only a shell understands, and no shell is run")]
    Shell {
        /// The command.
        text: String,
        /// Which.
        what: String,
    },
    /// A NUL byte, which no argument can hold.
    #[error("the command holds a NUL character")]
    Nul,
    /// More than can be executed.
    #[error("the command is too long")]
    Long,
}

impl Coded for CommandError {
    fn code(&self) -> Code {
        Code::Usage
    }
    fn hint(&self) -> Option<String> {
        match self {
            Self::Shell { text, .. } => {
                let quoted =
                    shlex::try_quote(text).map(|text| text.into_owned()).unwrap_or_else(|_| "'…'".into());
                Some(format!("to run it by a shell write: sh -c {quoted}; to mean it literally, quote it"))
            }
            Self::Empty => Some("name a program, like: cargo test".into()),
            Self::Quote(_) | Self::Nul | Self::Long => None,
        }
    }
}

/// Splits a command line by the shell's rules of quoting, and refuses what else a shell would do: pipes, lists,
/// redirections, expansions, globs, comments, assignments in front.
pub fn split_command(text: &str) -> Result<Vec<String>, CommandError> {
    if text.len() > BYTES_MAX {
        return Err(CommandError::Long);
    }
    let text = text.trim();
    if let Some(what) = shell_syntax(text) {
        return Err(CommandError::Shell { text: cut(text), what });
    }
    let argv = shlex::split(text).ok_or_else(|| CommandError::Quote(cut(text)))?;
    if let Some(first) = argv.first().filter(|first| is_assignment(first) && text.starts_with(first.as_str()))
    {
        return Err(CommandError::Shell {
            text: cut(text),
            what: format!("the assignment `{}` in front", cut(first)),
        });
    }
    checked(argv)
}

/// Checks argv that came as a list.
pub fn checked(argv: Vec<String>) -> Result<Vec<String>, CommandError> {
    if argv.first().is_none_or(String::is_empty) {
        return Err(CommandError::Empty);
    }
    if argv.len() > WORDS_MAX || argv.iter().map(String::len).sum::<usize>() > BYTES_MAX {
        return Err(CommandError::Long);
    }
    if argv.iter().any(|word| word.contains('\0')) {
        return Err(CommandError::Nul);
    }
    Ok(argv)
}

/// The command as text again, quoted where needed, for people.
pub fn join_command(argv: &[String]) -> String {
    let quote =
        |word: &String| shlex::try_quote(word).map(|word| word.into_owned()).unwrap_or_else(|_| "?".into());
    argv.iter().map(quote).collect::<Vec<_>>().join(" ")
}

/// The first thing outside quotes that a shell would act on.
fn shell_syntax(text: &str) -> Option<String> {
    let mut quote = None;
    let mut word_start = true;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some('\''), '\'') | (Some('"'), '"') => quote = None,
            (Some('\''), _) => {}
            (_, '\\') => {
                chars.next();
            }
            (_, '$' | '`') => return Some(format!("the expansion `{c}`")),
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(c),
            (None, '|' | '&' | ';' | '<' | '>' | '(' | ')') => return Some(format!("the operator `{c}`")),
            (None, '\n' | '\r') => return Some("more than one line".into()),
            (None, '*' | '?' | '[') => return Some(format!("the pattern `{c}`")),
            (None, '#') if word_start => return Some("a comment".into()),
            (None, '~') if word_start => return Some("the home directory `~`".into()),
            (None, _) => {}
        }
        word_start = quote.is_none() && c.is_whitespace();
    }
    None
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    })
}

fn cut(text: &str) -> String {
    text.chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, want: &str) {
        let got = match split_command(text) {
            Ok(argv) => format!("{argv:?}"),
            Err(error) => format!("{error}"),
        };
        assert_eq!(got, want, "{text:?}");
    }

    #[test]
    fn words_and_quotes() {
        check("cargo test", r#"["cargo", "test"]"#);
        check("  cargo   test ", r#"["cargo", "test"]"#);
        check(
            "sh -c 'a | b && echo $HOME > x; ls *.rs'",
            r#"["sh", "-c", "a | b && echo $HOME > x; ls *.rs"]"#,
        );
        check(r#"grep "a b" c\ d"#, r#"["grep", "a b", "c d"]"#);
        check(r#"echo \| \$x '*'"#, r#"["echo", "|", "$x", "*"]"#);
        check(r#"printf "100\$""#, r#"["printf", "100$"]"#);
        check("cargo test --features=a,b {} a#b", r#"["cargo", "test", "--features=a,b", "{}", "a#b"]"#);
        check("env A=1 make", r#"["env", "A=1", "make"]"#);
        check("true ''", r#"["true", ""]"#);
        check("grüße", r#"["grüße"]"#);
    }

    #[test]
    fn what_only_a_shell_understands_is_refused() {
        for (text, what) in [
            ("a | b", "the operator `|`"),
            ("a && b", "the operator `&`"),
            ("a; b", "the operator `;`"),
            ("a > b", "the operator `>`"),
            ("a < b", "the operator `<`"),
            ("(a)", "the operator `(`"),
            ("echo $HOME", "the expansion `$`"),
            ("echo \"$HOME\"", "the expansion `$`"),
            ("echo `id`", "the expansion ``"),
            ("ls *.rs", "the pattern `*`"),
            ("ls a?", "the pattern `?`"),
            ("ls [ab]", "the pattern `[`"),
            ("a # b", "a comment"),
            ("ls ~/x", "the home directory `~`"),
            ("a\nb", "more than one line"),
            ("RUST_LOG=debug cargo test", "the assignment `RUST_LOG=debug` in front"),
        ] {
            let error = split_command(text).unwrap_err();
            assert!(error.to_string().contains(what.trim_end_matches('`')), "{text}: {error}");
            assert!(error.hint().unwrap().contains("sh -c"), "{text}");
        }
    }

    #[test]
    fn nothing_to_run_is_refused() {
        for text in ["", "   ", "''"] {
            assert_eq!(split_command(text), Err(CommandError::Empty), "{text:?}");
        }
        assert!(matches!(split_command("echo 'a"), Err(CommandError::Quote(_))));
        assert!(matches!(split_command("echo \\"), Err(CommandError::Quote(_))));
        assert_eq!(split_command("a\0b"), Err(CommandError::Nul));
        assert_eq!(checked(vec![]), Err(CommandError::Empty));
        assert_eq!(split_command(&"x ".repeat(600_000)), Err(CommandError::Long));
    }

    #[test]
    fn a_command_joins_and_splits_back() {
        for argv in [vec!["a", "b c", "*"], vec!["sh", "-c", "echo 'x' \"$y\" | z"], vec!["x", ""]] {
            let argv: Vec<String> = argv.into_iter().map(str::to_owned).collect();
            assert_eq!(split_command(&join_command(&argv)).unwrap(), argv);
        }
    }
}
