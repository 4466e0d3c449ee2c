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
