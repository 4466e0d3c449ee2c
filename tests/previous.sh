#!/usr/bin/env bash
# Builds the programs of an earlier commit of this repository into a folder, beside its chart: those that run in a
# cluster beside newer ones while it is upgraded. Usage: previous.sh COMMIT FOLDER
set -euo pipefail
commit=$1 folder=$2
programs=(weft fabric-controller ipam route-agent gateway)
if [ -x "$folder/gateway" ] && [ -d "$folder/deploy" ]; then exit; fi
if ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
  git fetch --quiet --depth=1 origin "$commit" ||
    { echo "commit $commit is neither here nor at origin" >&2; exit 1; }
fi
mkdir -p "$folder"
git archive "$commit" deploy/chart | tar -x -C "$folder"
if [ -x "$folder/gateway" ]; then exit; fi
echo "building the programs of $commit, once, six minutes"
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git archive "$commit" | tar -x -C "$source"
cd "$source"
CARGO_TARGET_DIR=$source/target cargo build --quiet --release --locked "${programs[@]/#/--package=}"
for program in "${programs[@]}"; do
  install "target/release/$program" "$folder/$program.new"
  mv "$folder/$program.new" "$folder/$program"
done
