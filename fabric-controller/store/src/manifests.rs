//! The user's manifests. Whatever is done to them, the last good version of an object stands
//! until its manifest is gone or good again.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::folder::{Folder, Parse, Unreadable};
use crate::parse::{self, Located};
use crate::{Object, ObjectRef, Problem};

#[derive(Debug)]
pub(crate) struct Manifests {
    folder: Folder<Manifest>,
    unreadable: Option<Problem>,
}

/// One file.
#[derive(Debug, Default)]
struct Manifest {
    text: String,
    objects: Vec<Located>,
    problems: Vec<Problem>,
}

impl Manifests {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { folder: Folder::new(dir), unreadable: None }
    }

    pub(crate) fn refresh(&mut self) {
        self.unreadable = self.folder.refresh().err().map(|error| Problem {
            source: self.folder.path().display().to_string(),
            object: None,
            field: None,
            message: format!("the folder of manifests cannot be read: {error}"),
        });
    }

    /// Adds all objects and problems. Of an object in two files, the first file's is taken, so
    /// that every program takes the same.
    pub(crate) fn collect(
        &self,
        objects: &mut BTreeMap<ObjectRef, Object>,
        problems: &mut Vec<Problem>,
    ) {
        let mut places: BTreeMap<ObjectRef, String> = BTreeMap::new();
        problems.extend(self.unreadable.clone());
        for (file, manifest) in self.folder.files() {
            problems.extend(manifest.problems.iter().cloned());
            for located in &manifest.objects {
                let reference = located.object.reference();
                let place = format!("{file}:{}", located.document + 1);
                if let Some(first) = places.get(&reference) {
                    problems.push(Problem {
                        source: place,
                        message: format!("is also in {first}, which is used; expected it once"),
                        object: Some(reference),
                        field: None,
                    });
                    continue;
                }
                objects.insert(reference.clone(), located.object.clone());
                places.insert(reference, place);
            }
        }
    }

    /// Where a field of an object stands: `file:line`.
    pub(crate) fn locate(&self, object: &ObjectRef, field: &str) -> Option<String> {
        self.folder.files().find_map(|(file, manifest)| {
            let located = manifest.objects.iter().find(|l| l.object.reference() == *object)?;
            let documents = parse::documents(&manifest.text);
            let (start, text) = documents.iter().find(|(start, _)| *start == located.document)?;
            Some(parse::place(file, *start, text, &parse::join(&located.path, field)))
        })
    }
}

impl Parse for Manifest {
    fn update(&mut self, file: &str, text: Result<String, Unreadable>) {
        let text = match text {
            Ok(text) if text == self.text => return,
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
        let before = std::mem::replace(&mut self.objects, parsed.objects);
        let now: Vec<_> = self.objects.iter().map(|l| l.object.reference()).collect();
        self.objects.extend(before.into_iter().filter(|located| {
            let reference = located.object.reference();
            let kept = parsed.broken || parsed.refused.contains(&reference);
            kept && !now.contains(&reference)
        }));
        self.problems = parsed.problems;
        self.text = text;
    }
}
