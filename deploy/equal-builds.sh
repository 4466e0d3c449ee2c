#!/usr/bin/env bash
# Builds the programs of the last commit twice, in two folders and with nothing in common but the compiler and the
# sources of the crates, and compares them byte by byte; then an image of each from each, and compares their layers.
# Variables:
#
#   OUT     a folder for both; target/equal-builds
#   IMAGES  whose images are built, for this machine's platform; all by default, nothing: none
#   BASES   as for images.sh; packages, which of the second build have the versions of the first one's
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=$(realpath --canonicalize-missing "${OUT:-target/equal-builds}")
PROGRAMS=(fabric-controller weft ipam gateway route-agent)
IMAGES=${IMAGES-fabric-controller ipam gateway route-agent}
HERE=$(dpkg --print-architecture)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH BASES=${BASES-packages} PLATFORMS=linux/$HERE

# With images and layers of its own, so that nothing comes from the other build, and mounts that end with it.
build_images() { # COPY VERSIONS
  mkdir -p "$OUT/$1/images"
  printf '[storage]\ndriver = "overlay"\ngraphroot = "%s/storage"\nrunroot = "%s/run"\n' "$OUT/$1"{,} >"$OUT/$1/storage.conf"
  (cd "$OUT/$1" && CONTAINERS_STORAGE_CONF=$PWD/storage.conf OUT=$PWD/images BUILT=$PWD/target/release VERSIONS=$2 \
    PROGRAMS=$IMAGES unshare --mount deploy/images.sh >/dev/null)
}

# Digest of an image's manifest, which has the digests of its layers.
digest() { # COPY IMAGE
  tar --extract --to-stdout --file "$OUT/$1/images/$2-$HERE.tar" index.json | grep --only-matching 'sha256:[0-9a-f]*'
}

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
if [ -n "$IMAGES" ]; then
  build_images one ""
  build_images other "${BASES:+$OUT/one/images}"
fi
for image in $IMAGES; do
  if [ "$(digest one "$image")" = "$(digest other "$image")" ]; then
    echo "equal $(digest one "$image") $image, image"
  else
    echo "$image: images differ, $(digest one "$image") and $(digest other "$image")"
    different=1
  fi
done
rm -rf "${OUT:?}"/{one,other}
exit $different
