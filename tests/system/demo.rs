//! ```text
//!   demo: rome-1, rome-2 --- switch --- milan-1, milan-2
//! ```

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::{bin_dir, find_holders, wait_until};

/// The machines of the demo, as its own clean-up knows them.
const GROUP: &str = "weft-demo";

#[test]
fn interrupted_demo_reruns_and_leaves_nothing() -> Result<()> {
    for after in [200, 600, 1200] {
        end_early(Signal::SIGINT, Duration::from_millis(after))?;
        wait_until("an interrupted demo leaves no machine", Duration::from_secs(5), || {
            let left = find_holders(GROUP);
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?} are left")) }
        })?;
    }
    end_early(Signal::SIGKILL, Duration::from_millis(900))?;
    let whole = Command::new(bin_dir()?.join("demo")).output()?;
    let said = String::from_utf8_lossy(&whole.stdout);
    let complained = String::from_utf8_lossy(&whole.stderr);
    ensure!(whole.status.success(), "the demo failed: {complained}\nIt printed:\n{said}");
    // Both have 10.200.0.0/16 for pods: each sees the other under a prefix of its own.
    for prefix in ["10.201.", "10.211."] {
        ensure!(said.contains(prefix), "the demo shows no address in {prefix}0.0/16:\n{said}");
    }
    let left = find_holders(GROUP);
    ensure!(left.is_empty(), "{left:?} are left");
    Ok(())
}

fn end_early(signal: Signal, after: Duration) -> Result<()> {
    let mut demo = Command::new(bin_dir()?.join("demo"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    std::thread::sleep(after);
    let pid = Pid::from_raw(i32::try_from(demo.id())?);
    kill(pid, signal)?;
    demo.wait()?;
    Ok(())
}
