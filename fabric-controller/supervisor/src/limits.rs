//! Limits of the kernel and the host, recognised by the error that a program has met.

use std::fs;

use nix::libc;

/// Names the limit behind an error's text, and what raises it; `None` for other errors.
pub(crate) fn remedy(error: &str) -> Option<String> {
    let is = |number: i32| error.contains(&format!("(os error {number})"));
    if is(libc::ENOSPC) && error.contains("namespace") {
        return Some(sysctl("network namespaces", "user.max_net_namespaces", "100000"));
    }
    if is(libc::EMFILE) {
        return Some(
            "the limit of open files of a process is reached: raise it with `ulimit -n 65536`, or \
             LimitNOFILE= in the systemd unit"
                .to_owned(),
        );
    }
    if is(libc::ENFILE) {
        return Some(sysctl("open files", "fs.file-max", "1000000"));
    }
    if is(libc::EAGAIN) {
        return Some(sysctl(
            "processes (or `ulimit -u`, or TasksMax= of the systemd unit)",
            "kernel.pid_max",
            "4194304",
        ));
    }
    is(libc::ENOMEM).then(|| {
        "memory is used up: a gateway takes some 2 MB of its own; give the host, or the control \
         group (MemoryMax=), more"
            .to_owned()
    })
}

fn sysctl(what: &str, setting: &str, enough: &str) -> String {
    let path = format!("/proc/sys/{}", setting.replace('.', "/"));
    let value = fs::read_to_string(path).unwrap_or_default();
    format!(
        "the limit of {what} is reached: {setting} is {}; raise it with `sysctl -w \
         {setting}={enough}`",
        value.trim()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_the_kernel_name_limit_and_remedy() {
        let refused = [
            (libc::ENOSPC, "cannot make a network namespace: ", "user.max_net_namespaces"),
            (libc::EMFILE, "", "LimitNOFILE="),
            (libc::ENFILE, "", "fs.file-max"),
            (libc::EAGAIN, "cannot run /usr/bin/gateway: ", "TasksMax="),
            (libc::ENOMEM, "", "MemoryMax="),
        ];
        for (number, step, expected) in refused {
            let error = format!("{step}{}", std::io::Error::from_raw_os_error(number));
            let remedy = remedy(&error).unwrap_or_default();
            assert!(remedy.contains(expected), "{error}: {remedy}");
        }
        assert_eq!(remedy("cannot write /run/x: No space left on device (os error 28)"), None);
    }
}
