//! Kernel limits on file watching, named with their setting, its value and the remedy.

use nix::errno::Errno;

const INSTANCES: &str = "fs.inotify.max_user_instances";
const WATCHES: &str = "fs.inotify.max_user_watches";

/// Limit that refused an inotify instance; `None` for other errors.
pub(crate) fn inotify_instance(error: Option<i32>) -> Option<String> {
    let error = Errno::from_raw(error?);
    let file = || named("open file", "fs.file-max", "1000000");
    if error == Errno::EMFILE {
        return Some(named("inotify instance", INSTANCES, "1024"));
    }
    (error == Errno::ENFILE).then(file)
}

/// Limit that refused an inotify watch; `None` for other errors.
pub(crate) fn inotify_watch(error: Errno) -> Option<String> {
    (error == Errno::ENOSPC).then(|| named("inotify watch", WATCHES, "1048576"))
}

fn named(what: &str, setting: &str, enough: &str) -> String {
    let path = format!("/proc/sys/{}", setting.replace('.', "/"));
    let value = std::fs::read_to_string(path).unwrap_or_default();
    let value = value.trim();
    format!(
        "the kernel refuses another {what}: {setting} is {value}, all in use by this user's \
         programs; raise it with `sysctl -w {setting}={enough}`"
    )
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

    use super::*;

    const INSIDE: &str = "WEFT_TEST_INSIDE";

    /// Runs the test of this name once more in a user namespace where this limit is 0, and `refused` there.
    fn with_none(limit: &str, test: &str, refused: fn() -> String) {
        if std::env::var_os(INSIDE).is_some() {
            // The test around this one reads it.
            return eprintln!("{}", refused());
        }
        let script = format!("echo 0 >/proc/sys/user/{limit} && exec \"$@\"");
        let this = std::env::current_exe().unwrap();
        let mut inside = Command::new("unshare");
        inside.args(["--user", "--map-root-user", "sh", "-c", &script, "sh"]).arg(this);
        inside.args(["--exact", &format!("limits::tests::{test}"), "--nocapture"]);
        let output = inside.env(INSIDE, "yes").output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stdout));
        for part in ["the kernel refuses another inotify ", "fs.inotify.max_user_", "`sysctl -w "] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }

    #[test]
    fn refused_inotify_instance_names_limit_and_remedy() {
        with_none(
            "max_inotify_instances",
            "refused_inotify_instance_names_limit_and_remedy",
            || {
                let refused = Inotify::init(InitFlags::empty()).unwrap_err();
                inotify_instance(Some(refused as i32)).unwrap()
            },
        );
    }

    #[test]
    fn refused_inotify_watch_names_limit_and_remedy() {
        with_none("max_inotify_watches", "refused_inotify_watch_names_limit_and_remedy", || {
            let inotify = Inotify::init(InitFlags::empty()).unwrap();
            let refused = inotify.add_watch("/", AddWatchFlags::IN_CREATE).unwrap_err();
            inotify_watch(refused).unwrap()
        });
    }
}
