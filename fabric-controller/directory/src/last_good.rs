//! Last good version of the manifests, for programs that start while they are bad.
//!
//! One file for each of the user's, written by one program, the controller. Secrets are in it as well,
//! or a gateway that starts beside a file cut short would have no key; only root can read it.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use fabric_objects::{Kind, decode};
use serde_json::{Value, json};

use crate::file::{self, Mode};
use crate::folder;
use crate::parse::{self, Located};

#[derive(Debug)]
pub(crate) struct LastGood {
    dir: Option<PathBuf>,
    /// Absent in programs that only read it. What each file holds, as far as it is known.
    written: Option<BTreeMap<String, String>>,
}

impl LastGood {
    pub(crate) fn new(dir: Option<PathBuf>) -> Self {
        Self { dir, written: None }
    }

    /// Makes this program the writer from now on.
    pub(crate) fn write_from_now(&mut self) {
        let files = self.files().into_iter();
        self.written = Some(files.map(|file| (file.clone(), self.text(&file))).collect());
    }

    /// True if something that was written is gone.
    pub(crate) fn is_lost(&self) -> bool {
        let (Some(dir), Some(written)) = (&self.dir, &self.written) else { return false };
        written.keys().any(|file| !dir.join(file).exists())
    }

    /// The user's files that something is remembered of.
    pub(crate) fn files(&self) -> Vec<String> {
        let Some(entries) = self.dir.as_ref().and_then(|dir| fs::read_dir(dir).ok()) else {
            return Vec::new();
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter(|name| folder::is_manifest(name)).collect()
    }

    /// Objects that a file of the user held.
    pub(crate) fn of(&self, file: &str) -> Vec<Located> {
        let value = parse::value(&self.text(file)).unwrap_or_default();
        let items = value.as_array().cloned().unwrap_or_default();
        items.into_iter().filter_map(located).collect()
    }

    /// Remembers what a file holds now, if this program is the one that does. False if that has to
    /// be tried again.
    pub(crate) fn keep(&mut self, file: &str, objects: &[Located]) -> bool {
        let (Some(dir), Some(written)) = (&self.dir, &mut self.written) else { return true };
        let items: Vec<_> = objects
            .iter()
            .filter(|located| located.sound)
            .map(|l| json!({"document": l.document, "path": l.path, "object": l.object.to_value()}))
            .collect();
        if items.is_empty() {
            self.forget(file);
            return true;
        }
        let Ok(text) = serde_json::to_string(&items) else { return true };
        if written.get(file) == Some(&text) {
            return true;
        }
        match file::write(&dir.join(file), &text, Mode { secret: true, durable: false }) {
            Ok(()) => {
                written.insert(file.to_owned(), text);
                true
            }
            Err(error) => {
                tracing::warn!(file, %error, "cannot remember the last good version");
                false
            }
        }
    }

    /// Forgets all files but these.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        let known = self.written.iter().flat_map(BTreeMap::keys);
        let gone: Vec<String> = known.filter(|file| !is_there(file)).cloned().collect();
        gone.iter().for_each(|file| self.forget(file));
    }

    fn forget(&mut self, file: &str) {
        let (Some(dir), Some(written)) = (&self.dir, &mut self.written) else { return };
        if written.remove(file).is_some()
            && let Err(error) = file::remove(&dir.join(file))
        {
            tracing::warn!(file, %error, "cannot forget a manifest that is gone");
        }
    }

    /// The same, as it was written.
    pub(crate) fn text(&self, file: &str) -> String {
        let path = self.dir.as_ref().map(|dir| dir.join(file));
        path.and_then(|path| folder::read(&path).ok()).unwrap_or_default()
    }
}

fn located(mut item: Value) -> Option<Located> {
    let value = item.get_mut("object")?.take();
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default();
    let kind = Kind::from_type(text("apiVersion"), text("kind"))?;
    let (object, _) = decode::object(kind, value).ok()?;
    let document = usize::try_from(item.get("document")?.as_u64()?).ok()?;
    let path = item.get("path")?.as_str()?.to_owned();
    Some(Located { object, document, path, sound: true })
}
