//! Log files of the processes: kept from growing without end, and read from their end.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use super::messages::say;
use super::rundir::RunDir;

/// A log longer than this is put aside as NAME.log.1, in bytes.
const LONGEST: u64 = 4 << 20;
/// Size of a log's end that is searched for its last lines, in bytes.
pub const TAIL: u64 = 1 << 20;
/// The same for its very last line: the caller is about to start the process again.
const SHORT_TAIL: u64 = 4 << 10;

/// Puts aside each log that has grown too long. The processes have it open for appending, so it is
/// copied and cut rather than renamed; a line written in between can be lost.
pub fn bound(dir: &RunDir) {
    let Ok(entries) = fs::read_dir(dir.logs()) else { return };
    let logs = entries.filter_map(|entry| Some(entry.ok()?.path()));
    for path in logs.filter(|path| path.extension().is_some_and(|e| e == "log")) {
        if fs::metadata(&path).is_ok_and(|meta| meta.len() > LONGEST) {
            let aside = path.with_extension("log.1");
            let put = fs::copy(&path, &aside)
                .and_then(|_| OpenOptions::new().write(true).mode(0o640).open(&path)?.set_len(0));
            if let Err(error) = put {
                say(&format!("cannot shorten {}: {error}", path.display()));
            }
        }
    }
}

/// The last line of a log, cut to a length fit for a message; `None` if it is empty.
pub fn last_line(path: &Path) -> Option<String> {
    let (text, _) = tail(path, SHORT_TAIL, 1).ok()?;
    let line: String = text.trim().chars().filter(|c| !c.is_control()).take(300).collect();
    (!line.is_empty()).then_some(line)
}

/// The last lines, and where the log ends.
pub fn tail(path: &Path, within: u64, lines: usize) -> io::Result<(String, u64)> {
    let mut file = File::open(path)?;
    let end = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(end.saturating_sub(within)))?;
    let mut bytes = Vec::new();
    file.take(within).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<_> = text.lines().collect();
    let text = all[all.len().saturating_sub(lines)..].iter().map(|line| format!("{line}\n"));
    Ok((text.collect(), end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_log_is_rotated_under_its_process() {
        use std::io::Write as _;
        let root = std::env::temp_dir().join(format!("weft-logs-{}", std::process::id()));
        let dir = RunDir::at(&root).unwrap();
        dir.create().unwrap();
        let path = dir.log_file("ipam");
        let mut process = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        process.write_all(&vec![b'x'; usize::try_from(LONGEST).unwrap() + 1]).unwrap();
        bound(&dir);
        process.write_all(b"after\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "after\n");
        assert!(fs::metadata(dir.logs().join("ipam.log.1")).unwrap().len() > LONGEST);
        fs::remove_dir_all(root).unwrap();
    }
}
