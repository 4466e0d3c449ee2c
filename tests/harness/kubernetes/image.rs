use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use super::programs::find;
use crate::netns::finish;
use crate::program::PROGRAMS;
use crate::{bin_dir, previous_dir};

/// The image of busybox that every node has.
pub const BUSYBOX: &str = "localhost/busybox:1";

/// Stand-in for the image by which liqoctl tests the network.
pub const NETSHOOT: &str = "localhost/netshoot:1";

/// The image of all programs of weft.
pub const WEFT: &str = "localhost/weft:test";

/// Tag of the image of an earlier version.
pub(super) const PREVIOUS: &str = "previous";

/// A container image of programs of this machine, made without a builder.
pub struct Image {
    name: String,
    entrypoint: Vec<String>,
    command: Vec<String>,
    files: BTreeMap<PathBuf, PathBuf>,
    links: Vec<(String, String)>,
}

impl Image {
    /// An empty one; `name` is all of it, as in `localhost/gateway:1`.
    pub fn new(name: &str, command: &[&str]) -> Self {
        let command = command.iter().map(|word| (*word).to_owned()).collect();
        let (entrypoint, files, links) = (Vec::new(), BTreeMap::new(), Vec::new());
        Self { name: name.to_owned(), entrypoint, command, files, links }
    }

    /// Sets the program that gets the arguments of a container.
    pub fn entrypoint(self, program: &str) -> Self {
        let words = [program].into_iter().filter(|word| !word.is_empty());
        Self { entrypoint: words.map(str::to_owned).collect(), ..self }
    }

    pub(super) fn named(self, name: &str) -> Self {
        Self { name: name.to_owned(), ..self }
    }

    /// Adds a file of this machine under an absolute path, in place of any link.
    pub fn file(mut self, path: impl Into<PathBuf>, source: impl Into<PathBuf>) -> Self {
        let path = path.into();
        self.links.retain(|(link, _)| Path::new(link) != path);
        self.files.insert(path, source.into());
        self
    }

    /// Adds a program, and the libraries that it is linked to where they are here.
    pub fn program(self, name: &str, source: &Path) -> Result<Self> {
        let libraries = libraries(source)?;
        let image = self.file(Path::new("/bin").join(name), source);
        Ok(libraries.into_iter().fold(image, |image, library| image.file(library.clone(), library)))
    }

    pub fn link(mut self, path: &str, target: &str) -> Self {
        self.links.push((path.to_owned(), target.to_owned()));
        self
    }

    /// Busybox under all of its names; by default it sleeps.
    pub fn busybox() -> Result<Self> {
        let program = find("busybox").context("busybox is not installed")?;
        let names = finish(Command::new(&program).arg("--list"), "")?;
        let image = Self::new(BUSYBOX, &["/bin/sleep", "2147483647"]);
        let image = image.file("/bin/busybox", program);
        let others = names.lines().filter(|name| *name != "busybox");
        Ok(others.fold(image, |image, name| image.link(&format!("/bin/{name}"), "busybox")))
    }

    /// Busybox that answers the calls of curl and nc by which liqoctl tests the network, as the image
    /// netshoot does.
    pub fn netshoot() -> Result<Self> {
        let here = std::fs::canonicalize("harness/kubernetes/netshoot");
        let here = here.context("not started in the folder `tests`")?;
        let image = Self::busybox()?.named(NETSHOOT).file("/www/index.html", here.join("curl"));
        let names = ["curl", "nc"].iter();
        Ok(names.fold(image, |image, name| image.file(format!("/bin/{name}"), here.join(name))))
    }

    /// The programs of weft that were built, and what they start.
    pub fn weft() -> Result<Self> {
        Self::of_programs(WEFT, &bin_dir()?)
    }

    /// Those of an earlier version.
    pub fn previous() -> Result<Self> {
        Self::of_programs(&format!("localhost/weft:{PREVIOUS}"), &previous_dir()?)
    }

    fn of_programs(name: &str, dir: &Path) -> Result<Self> {
        let nft = find("nft").context("nft is not installed")?;
        let image = Self::new(name, &["weft"]).program("nft", &nft)?;
        // Without it names are not looked for in /etc/hosts first.
        let names = "/etc/nsswitch.conf";
        let image = image.file(names, names);
        PROGRAMS.iter().try_fold(image, |image, name| image.program(name, &dir.join(name)))
    }

    /// Writes the archive that `docker load` and `ctr images import` read.
    pub fn write(&self, archive: &Path) -> Result<()> {
        let bytes = self.archive().with_context(|| format!("making the image {}", self.name))?;
        std::fs::write(archive, bytes).with_context(|| format!("writing {}", archive.display()))
    }

    fn archive(&self) -> Result<Vec<u8>> {
        let layer = self.layer()?;
        let digest: String = Sha256::digest(&layer).iter().map(|b| format!("{b:02x}")).collect();
        let config = json!({
            "architecture": match std::env::consts::ARCH { "x86_64" => "amd64", "aarch64" => "arm64", other => other },
            "os": "linux",
            "config": {"Entrypoint": self.entrypoint, "Cmd": self.command, "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
        });
        let manifest =
            json!([{"Config": "config.json", "RepoTags": [self.name], "Layers": ["layer.tar"]}]);
        let mut archive = Builder::new(Vec::new());
        append(&mut archive, "layer.tar", 0o644, &layer)?;
        append(&mut archive, "config.json", 0o644, config.to_string().as_bytes())?;
        append(&mut archive, "manifest.json", 0o644, manifest.to_string().as_bytes())?;
        Ok(archive.into_inner()?)
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let mut archive = Builder::new(Vec::new());
        for (path, source) in &self.files {
            let bytes = std::fs::read(source);
            let bytes = bytes.with_context(|| format!("reading {}", source.display()))?;
            append(&mut archive, path.strip_prefix("/").unwrap_or(path), 0o755, &bytes)?;
        }
        for (path, target) in &self.links {
            let mut header = Header::new_ustar();
            header.set_entry_type(EntryType::Symlink);
            header.set_mode(0o777);
            header.set_size(0);
            archive.append_link(&mut header, path.trim_start_matches('/'), target)?;
        }
        Ok(archive.into_inner()?)
    }
}

/// Absolute paths of what a program is linked to, the loader among them; none if it is static.
pub(super) fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let text = match finish(Command::new("ldd").arg(program), "") {
        Err(error) if error.to_string().contains("not a dynamic executable") => String::new(),
        text => text?,
    };
    let path =
        |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(Into::into);
    Ok(text.lines().filter_map(path).collect())
}

fn append<W: Write>(
    archive: &mut Builder<W>,
    path: impl AsRef<Path>,
    mode: u32,
    bytes: &[u8],
) -> std::io::Result<()> {
    let mut header = Header::new_ustar();
    header.set_mode(mode);
    header.set_size(bytes.len() as u64);
    archive.append_data(&mut header, path, bytes)
}
