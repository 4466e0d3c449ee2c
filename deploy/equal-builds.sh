#!/usr/bin/env bash
# Builds the programs of the last commit twice, in two folders and with nothing in common but the compiler and the
# sources of the crates, and compares them byte by byte. Variable:
#
#   OUT  a folder for both; target/equal-builds
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=$(realpath --canonicalize-missing "${OUT:-target/equal-builds}")
PROGRAMS=(fabric-controller weft ipam gateway route-agent)

for copy in one other; do
  rm -rf "${OUT:?}/$copy"
  mkdir -p "$OUT/$copy"
  git archive HEAD | tar --extract --directory "$OUT/$copy"
  echo "equal-builds: builds ${PROGRAMS[*]} in $OUT/$copy, some minutes" >&2
  (cd "$OUT/$copy" && CARGO_TARGET_DIR=$PWD/target cargo build --quiet --release --locked "${PROGRAMS[@]/#/--package=}")
done
different=0
for program in "${PROGRAMS[@]}"; do
  if cmp "$OUT"/{one,other}/target/release/"$program"; then
    echo "equal $(sha256sum "$OUT/one/target/release/$program" | cut --delimiter=' ' --fields=1) $program"
  else
    different=1
  fi
done
rm -rf "${OUT:?}"/{one,other}
exit $different
