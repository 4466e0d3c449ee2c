//! The user's manifests. Whatever is done to them, the last good version of an object stands
//! until its manifest is gone or good again.

mod cut;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fabric_api::labels;
use fabric_objects::{Kind, Object, ObjectRef, Problem};

use crate::folder::{Folder, Parse, Unreadable};
use crate::last_good::LastGood;
use crate::parse::{self, Located};

/// Time after which an object that vanished from a file edited in place counts as gone; and after the last file with
/// which an empty folder fills again, those that are not among them.
pub(crate) const SETTLE: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Manifests {
    folder: Folder<Manifest>,
    last_good: LastGood,
    /// The only objects that matter, unless all do: files without their names are not parsed.
    only: Vec<ObjectRef>,
    /// Why what was there stays.
    unreadable: Option<Problem>,
    /// ID of the cluster, once one was read.
    cluster: Option<String>,
    /// Files that have that.
    files_of_id: BTreeSet<String>,
    /// The folder was read before: until then it may still be filling, as at the start of a host.
    was_read: bool,
    filling: Option<Filling>,
    /// Last readable content of files that could not be read since the start.
    remembered: Vec<(String, Vec<Located>)>,
}

/// A folder that has files again.
#[derive(Debug)]
struct Filling {
    /// Time of the last new one, and how many there are.
    since: Instant,
    count: usize,
    /// Known files that it does not have.
    lacks: BTreeSet<String>,
}

/// One file.
#[derive(Debug, Default)]
struct Manifest {
    text: String,
    /// The last text that had nothing wrong with it.
    good: String,
    objects: Vec<Located>,
    problems: Vec<Problem>,
    /// Objects that have vanished from a file that may still be being written.
    leaving: Option<(Instant, BTreeSet<ObjectRef>)>,
    /// True if it was seen before.
    known: bool,
    /// True if its content is not remembered yet.
    changed: bool,
}

impl Manifests {
    /// Manifests of all objects, or of these only.
    pub(crate) fn new(dir: PathBuf, last_good: Option<PathBuf>, only: Vec<ObjectRef>) -> Self {
        let (folder, last_good) = (Folder::new(dir, None), LastGood::new(last_good));
        let (unreadable, remembered) = (None, Vec::new());
        let (cluster, files_of_id) = (None, BTreeSet::new());
        let (was_read, filling) = (false, None);
        Self {
            folder,
            last_good,
            only,
            unreadable,
            cluster,
            files_of_id,
            was_read,
            filling,
            remembered,
        }
    }

    pub(crate) fn refresh(&mut self) {
        self.unreadable = self.refresh_folder().err().map(|problem| *problem);
        self.remembered.clear();
        if self.unreadable.is_some() || self.filling.is_some() {
            let cached: BTreeSet<&str> = self.folder.files().map(|(file, _)| file).collect();
            let files = self.last_good.files().into_iter();
            let lacking = files.filter(|file| !cached.contains(file.as_str()));
            self.remembered =
                lacking.map(|file| (file.clone(), self.last_good.of(&file))).collect();
        }
        for (file, manifest) in self.folder.files_mut() {
            manifest.settle();
            if !std::mem::replace(&mut manifest.known, true)
                && names_any(&self.only, &self.last_good.text(file))
            {
                manifest.restore(file, self.last_good.of(file));
            }
        }
        self.keep();
    }

    /// Reads the folder, or returns why what was there stays. One without any file most likely is the place of a
    /// file system that is not mounted, or about to be filled again.
    fn refresh_folder(&mut self) -> Result<(), Box<Problem>> {
        let problem = |message: String| {
            Box::new(Problem {
                source: self.folder.path().display().to_string(),
                object: None,
                field: None,
                message,
            })
        };
        let names = self.folder.names();
        let names = names.map_err(|error| {
            problem(format!("cannot be read: {error}; expected a directory of manifests"))
        })?;
        if names.is_empty() && !self.known().is_empty() {
            return Err(problem(
                "holds no manifest any more, and what was there stays in use; expected the manifests, or \
                 `weft down` to take the fabric away"
                    .to_owned(),
            ));
        }
        self.check_cluster(&names)?;
        self.filling = self.filling(&names);
        let (last_good, only) = (&self.last_good, &self.only);
        self.folder.refresh_if(names, self.filling.is_some(), |file, text| {
            names_any(only, text) || names_any(only, &last_good.text(file))
        });
        Ok(())
    }

    /// Fails if the folder is another cluster's by now, or nobody's: nodes and peers know this one by its ID.
    fn check_cluster(&mut self, names: &[String]) -> Result<(), Box<Problem>> {
        if self.cluster.is_none() {
            for file in self.last_good.files() {
                let Some((_, id)) = cluster_id(&self.last_good.of(&file)) else { continue };
                if *self.cluster.get_or_insert_with(|| id.clone()) == id {
                    self.files_of_id.insert(file);
                }
            }
        }
        let mut cluster = self.cluster.clone();
        for (file, text) in self.folder.changed(names) {
            if !(text.contains(labels::CLUSTER_ID_CONFIGMAP) || self.files_of_id.contains(file)) {
                continue;
            }
            let parsed = parse::parse(file, &text);
            let Some((located, found)) = cluster_id(&parsed.objects) else {
                // While there is a slip in it, the last good one stands.
                if parsed.problems.is_empty() && !text.trim().is_empty() {
                    self.files_of_id.remove(file);
                }
                continue;
            };
            let known = cluster.get_or_insert_with(|| found.clone());
            if *known == found {
                self.files_of_id.insert(file.to_owned());
                continue;
            }
            let field = format!("data.{}", labels::CLUSTER_ID_KEY);
            let message = format!(
                "found {found}; expected {known}, by which nodes and peers go on to know this cluster, and no change \
                 of this folder is applied; to give it another name, take weft away first (`weft down`)"
            );
            let place = place(file, &text, located, &field);
            let source = place.unwrap_or_else(|| file.to_owned());
            let object = Some(cluster_map());
            return Err(Box::new(Problem { source, object, field: Some(field), message }));
        }
        self.cluster = cluster;
        let is_there = names.iter().any(|name| self.files_of_id.contains(name));
        match &self.cluster {
            Some(known) if !is_there => Err(Box::new(Problem {
                source: self.folder.path().display().to_string(),
                object: Some(cluster_map()),
                field: None,
                message: format!(
                    "missing; expected CLUSTER_ID: {known}, by which nodes and peers go on to know this cluster; until \
                     then no change of this folder is applied"
                ),
            })),
            Some(_) | None => Ok(()),
        }
    }

    /// Names of all files that something is known of.
    fn known(&self) -> BTreeSet<String> {
        let cached = self.folder.files().map(|(file, _)| file.to_owned());
        cached.chain(self.last_good.files()).collect()
    }

    fn filling(&mut self, names: &[String]) -> Option<Filling> {
        let (now, count) = (Instant::now(), names.len());
        let is_first = !std::mem::replace(&mut self.was_read, true);
        let since = match &self.filling {
            _ if self.unreadable.is_some() || is_first => now,
            Some(before) if count <= before.count => before.since,
            Some(_) => now,
            None => return None,
        };
        let known = self.known().into_iter();
        let lacks: BTreeSet<String> = known.filter(|file| !names.contains(file)).collect();
        let is_whole = is_first && self.unreadable.is_none() && lacks.is_empty();
        (now < since + SETTLE && !is_whole).then_some(Filling { since, count, lacks })
    }

    /// See [`crate::Watch::remember`].
    pub(crate) fn remember(&mut self) {
        self.write_all();
        self.keep();
    }

    fn write_all(&mut self) {
        self.last_good.write_from_now();
        self.folder.files_mut().for_each(|(_, manifest)| manifest.changed = true);
    }

    pub(crate) fn is_unsettled(&self) -> bool {
        let mut files = self.folder.files();
        self.filling.is_some() || files.any(|(_, manifest)| manifest.leaving.is_some())
    }

    fn keep(&mut self) {
        if self.unreadable.is_some() {
            return;
        }
        if self.last_good.is_lost() {
            self.write_all();
        }
        if self.filling.is_none() {
            let there: BTreeSet<&str> = self.folder.files().map(|(file, _)| file).collect();
            self.last_good.retain(|file| there.contains(file));
        }
        for (file, manifest) in self.folder.files_mut().filter(|(_, m)| m.changed) {
            manifest.changed = !self.last_good.keep(file, &manifest.objects);
        }
    }

    /// Adds all objects and problems. Of an object in two files, the first file's is taken, so
    /// that every program takes the same; but none that is wrong if there is one that is not.
    pub(crate) fn collect(
        &self,
        objects: &mut BTreeMap<ObjectRef, Object>,
        problems: &mut Vec<Problem>,
    ) {
        let mut places: BTreeMap<ObjectRef, (String, bool)> = BTreeMap::new();
        problems.extend(self.unreadable.clone());
        problems.extend(self.folder.files().flat_map(|(_, manifest)| manifest.problems()));
        for (file, located) in self.located() {
            let reference = located.object.reference();
            let place = format!("{file}:{}", located.document + 1);
            // Routes hang on what it was granted.
            let has_grant = matches!(reference.kind, Kind::Network | Kind::Ip);
            if has_grant && objects.contains_key(&reference) && !places.contains_key(&reference) {
                problems.push(Problem {
                    source: place,
                    message: "weft has one of this name for its own use, which stays; expected another name"
                        .to_owned(),
                    object: Some(reference),
                    field: Some("metadata.name".to_owned()),
                });
                continue;
            }
            if let Some((first, sound)) = places.get(&reference).cloned() {
                if self.lacks(file) {
                    continue;
                }
                let better = located.sound && !sound;
                let (used, other) = if better { (&place, &first) } else { (&first, &place) };
                problems.push(Problem {
                    source: other.clone(),
                    message: format!("is also in {used}, which is used; expected it once"),
                    object: Some(reference.clone()),
                    field: None,
                });
                if !better {
                    continue;
                }
            }
            objects.insert(reference.clone(), located.object.clone());
            places.insert(reference, (place, located.sound));
        }
    }

    /// Those of files that the folder lacks for the moment last: they may be in another one by now.
    fn located(&self) -> impl Iterator<Item = (&str, &Located)> {
        let files = || self.folder.files().map(|(file, manifest)| (file, &manifest.objects));
        let there = files().filter(|(file, _)| !self.lacks(file));
        let lacking = files().filter(|(file, _)| self.lacks(file));
        let remembered = self.remembered.iter().map(|(file, objects)| (file.as_str(), objects));
        let all = there.chain(lacking).chain(remembered);
        all.flat_map(|(file, objects)| objects.iter().map(move |o| (file, o)))
    }

    fn lacks(&self, file: &str) -> bool {
        self.filling.as_ref().is_some_and(|filling| filling.lacks.contains(file))
    }

    /// Names of the files that hold an object; `None` if a change of one may go without an event
    /// that names it.
    pub(crate) fn files_of(&self, object: &ObjectRef) -> Option<Vec<String>> {
        if self.unreadable.is_some() {
            return None;
        }
        let holding = self.located().filter(|(_, located)| located.object.reference() == *object);
        let files: Vec<_> = holding.map(|(file, _)| file.to_owned()).collect();
        let is_link = |file: &String| self.folder.path().join(file).is_symlink();
        (!files.iter().any(is_link)).then_some(files)
    }

    /// Returns the position of an object's field: `file:line`.
    pub(crate) fn locate(&self, object: &ObjectRef, field: &str) -> Option<String> {
        self.folder.files().find_map(|(file, manifest)| {
            let located = manifest.objects.iter().find(|l| l.object.reference() == *object)?;
            place(file, &manifest.text, located, field)
        })
    }
}

/// Position of an object's field in the text of a file.
fn place(file: &str, text: &str, located: &Located, field: &str) -> Option<String> {
    let documents = parse::documents(text);
    let (start, text) = documents.iter().find(|(start, _)| *start == located.document)?;
    Some(parse::place(file, *start, text, &parse::join(&located.path, field)))
}

fn cluster_map() -> ObjectRef {
    ObjectRef::new(Kind::ConfigMap, labels::LIQO_NAMESPACE, labels::CLUSTER_ID_CONFIGMAP)
}

fn cluster_id(objects: &[Located]) -> Option<(&Located, String)> {
    let located = objects.iter().find(|located| located.object.reference() == cluster_map())?;
    let Object::ConfigMap(map) = &located.object else { return None };
    Some((located, map.data.as_ref()?.get(labels::CLUSTER_ID_KEY)?.clone()))
}

/// Returns true if a text holds the name of one of these objects, or all objects matter.
fn names_any(only: &[ObjectRef], text: &str) -> bool {
    let names = |object: &ObjectRef| {
        let namespace = object.namespace.as_deref().unwrap_or_default();
        // The one namespace that need not be written down.
        let is_named = namespace == "default" || text.contains(namespace);
        text.contains(&object.name) && is_named
    };
    only.is_empty() || only.iter().any(names)
}

impl Parse for Manifest {
    fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.problems.is_empty()
    }

    fn update(&mut self, file: &str, text: Result<String, Unreadable>, in_place: bool) {
        let text = match text {
            Ok(text) if text == self.text && self.known => return,
            Ok(text) => text,
            Err(error) => {
                self.text.clear();
                self.problems = vec![Problem {
                    source: file.to_owned(),
                    object: None,
                    field: None,
                    message: error.to_string(),
                }];
                return;
            }
        };
        let parsed = parse::parse(file, &text);
        self.problems = parsed.problems;
        self.problems.extend(cut::off(file, &self.good, &text));
        self.take(parsed.objects, in_place);
        if self.problems.is_empty() {
            self.good.clone_from(&text);
        }
        self.text = text;
    }
}

impl Manifest {
    /// Takes new versions of objects over, but a wrong one only if there is no good one. While
    /// anything in the file is wrong, nothing that it had counts as gone.
    fn take(&mut self, now: Vec<Located>, in_place: bool) {
        self.changed = true;
        let mut before: BTreeMap<ObjectRef, Located> = std::mem::take(&mut self.objects)
            .into_iter()
            .map(|located| (located.object.reference(), located))
            .collect();
        for mut located in now {
            let good = before.remove(&located.object.reference()).filter(|good| good.sound);
            if let Some(good) = good.filter(|_| !located.sound) {
                (located.object, located.sound) = (good.object, true);
            }
            self.objects.push(located);
        }
        self.leaving = None;
        if self.problems.is_empty() && in_place && !before.is_empty() {
            self.leaving = Some((Instant::now(), before.keys().cloned().collect()));
        } else if self.problems.is_empty() {
            return;
        }
        self.objects.extend(before.into_values());
    }

    /// Returns the problems; those of an object that is good here are of a newer version, which is not used.
    fn problems(&self) -> impl Iterator<Item = Problem> {
        let good = self.objects.iter().filter(|located| located.sound);
        let good: BTreeSet<ObjectRef> = good.map(|located| located.object.reference()).collect();
        self.problems.iter().cloned().map(move |problem| match &problem.object {
            Some(object) if good.contains(object) => problem.with_last_good_in_use(),
            Some(_) | None => problem,
        })
    }

    /// Drops the objects that vanished a while ago and have not come back.
    fn settle(&mut self) {
        let Some((_, leaving)) = self.leaving.take_if(|(since, _)| since.elapsed() >= SETTLE)
        else {
            return;
        };
        self.changed = true;
        self.objects.retain(|located| !leaving.contains(&located.object.reference()));
    }

    /// Restores the last good version of a file that is bad the first time it is seen.
    fn restore(&mut self, file: &str, last_good: Vec<Located>) {
        if self.text.trim().is_empty() && !last_good.is_empty() && self.problems.is_empty() {
            self.problems.push(cut::to_nothing(file, last_good.len()));
        }
        if self.problems.is_empty() {
            return;
        }
        let now = std::mem::replace(&mut self.objects, last_good);
        self.take(now, false);
    }
}
