//! Selection of the fabric that a command means, among those of this host.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use fabric_api::ClusterId;
use fabric_supervisor::rundir::{RUN_ROOT, RunDir};
use fabric_supervisor::{lock, process};

/// Which fabric of this host is meant.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Selection {
    /// The cluster, when this host runs the fabric of several.
    #[arg(long, value_name = "ID", env = "WEFT_CLUSTER")]
    pub(crate) cluster: Option<ClusterId>,
    /// Its run directory, if it is not /run/weft/CLUSTER.
    #[arg(long, value_name = "DIR", env = "WEFT_RUN_DIR")]
    pub(crate) run_dir: Option<PathBuf>,
}

impl Selection {
    /// The run directory meant: the one named, or the only one there is, or of several the only one
    /// in which something runs. `None` if there is none.
    pub(crate) fn find(&self) -> anyhow::Result<Option<RunDir>> {
        if let Some(dir) = &self.run_dir {
            let dir = RunDir::at(dir)?;
            return Ok(dir.path().is_dir().then_some(dir));
        }
        if let Some(cluster) = &self.cluster {
            let dir = RunDir::of(cluster);
            if dir.path().is_dir() {
                return Ok(Some(dir));
            }
            // The run directory of `weft agent` is not called like the cluster.
            let is_of = |dir: &RunDir| cluster_of(dir).as_deref() == Some(cluster.as_str());
            return Ok(all()?.into_iter().find(is_of));
        }
        let mut all = all()?;
        if all.len() > 1 && all.iter().any(is_used) {
            all.retain(is_used);
        }
        if all.len() > 1 {
            let names: Vec<_> = all.iter().filter_map(|d| d.path().file_name()?.to_str()).collect();
            bail!(
                "this host runs the fabric of {} clusters ({}); say which with --cluster ID",
                all.len(),
                names.join(", ")
            );
        }
        Ok(all.pop())
    }

    /// Same as [`Self::find`], but fails if there is none.
    pub(crate) fn require(&self) -> anyhow::Result<RunDir> {
        self.find()?.with_context(|| {
            format!(
                "no fabric runs here: found nothing in {}; expected what `weft up` or `weft agent` \
                 leaves there. Start one of them, or say where with --run-dir DIR",
                self.searched()
            )
        })
    }

    /// The place that is looked at, and what others there are.
    pub(crate) fn searched(&self) -> String {
        let place = self.place().display().to_string();
        let others = all().unwrap_or_default().into_iter().filter(|dir| dir.path() != self.place());
        let others: Vec<_> = others
            .map(|dir| match cluster_of(&dir) {
                Some(cluster) => format!("{} (cluster {cluster})", dir.path().display()),
                None => dir.path().display().to_string(),
            })
            .collect();
        match others.is_empty() {
            true => place,
            false => format!("{place}, but there is {}", others.join(", ")),
        }
    }

    /// Path of the run directory that is looked for.
    pub(crate) fn place(&self) -> PathBuf {
        match (&self.run_dir, &self.cluster) {
            (Some(dir), _) => dir.clone(),
            (None, Some(cluster)) => RunDir::of(cluster).path().to_owned(),
            (None, None) => PathBuf::from(RUN_ROOT),
        }
    }
}

/// Cluster of a run directory, as far as that is known.
fn cluster_of(dir: &RunDir) -> Option<String> {
    dir.record().ok().flatten()?.cluster_id
}

/// Run directories in the usual place.
pub(crate) fn all() -> anyhow::Result<Vec<RunDir>> {
    folders(Path::new(RUN_ROOT))?.iter().map(|path| RunDir::at(path)).collect()
}

/// Returns true if a supervisor or a process of a run directory runs.
fn is_used(dir: &RunDir) -> bool {
    lock::supervisor_of(dir).is_some() || !process::running(dir).is_empty()
}

/// The visible ones.
fn folders(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            let error = anyhow::Error::new(error);
            return Err(error.context(format!("cannot read folder {}", root.display())));
        }
    };
    let mut found: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."))
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    Ok(found)
}
