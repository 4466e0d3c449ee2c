//! Files that were cut short, by a full disk or in the middle of being written: what is left may
//! be good YAML by chance.

use fabric_objects::Problem;

use crate::outline::Outline;
use crate::parse::documents;

/// The problem with a text that is the beginning of what was there before, and ends where nobody
/// would have stopped. Removing the last documents, or lines of the last one, is an edit.
pub(super) fn off(file: &str, before: &str, now: &str) -> Option<Problem> {
    let rest = before.strip_prefix(now).filter(|rest| !rest.trim().is_empty())?;
    let (had, has) = (documents(before), documents(now));
    if has.is_empty() {
        return Some(to_nothing(file, had.len()));
    }
    let in_a_line = !now.ends_with('\n') && !rest.starts_with('\n');
    let next = rest.trim_start_matches('\n');
    let last = now.trim_end().lines().last().unwrap_or_default();
    let between =
        [next, last].iter().any(|line| line.starts_with("---") || line.starts_with("..."));
    if !in_a_line && (between || had.len() == has.len()) {
        return None;
    }
    let (start, document) = has.last()?;
    let outline = Outline::of(document, usize::MAX);
    let (line, missing) = (now.lines().count(), rest.lines().count());
    Some(Problem {
        source: format!("{file}:{}", line.max(start + 1)),
        object: outline.object,
        field: outline.field,
        message: format!("found the end of the file; expected {missing} more lines, as there were"),
    })
}

/// The problem with a file that has nothing in it any more.
pub(super) fn to_nothing(file: &str, objects: usize) -> Problem {
    Problem {
        source: file.to_owned(),
        object: None,
        field: None,
        message: format!("is empty; expected the {objects} objects it had, or no file"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str =
        "kind: A\nspec:\n  port: 1234\n  mtu: 1340\n---\nkind: B\nspec:\n  x: 1\n  y: 2\n";

    #[test]
    fn every_cut_inside_a_document_is_detected() {
        let last = TWO.find("---").unwrap();
        for end in 0..TWO.len() {
            let now = &TWO[..end];
            let noticed = off("f", TWO, now).is_some();
            let whole_line = now.ends_with('\n') || TWO[end..].starts_with('\n');
            let edit = whole_line && end >= last - 1;
            assert_eq!(noticed, !edit, "{now:?}");
        }
    }

    #[test]
    fn other_edits_are_no_cut() {
        for now in [TWO, "kind: A\n---\nkind: B\n", &TWO.replace("1340", "1290")] {
            assert_eq!(off("f", TWO, now), None);
        }
        assert_eq!(off("f", "", "kind: A"), None, "the first time");
        let problem = off("f", TWO, "kind: A\nspec:\n  port: 12").unwrap();
        assert_eq!(
            problem.to_string(),
            "f:3: spec.port: found the end of the file; expected 7 more lines, as there were"
        );
    }
}
