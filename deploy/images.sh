#!/usr/bin/env bash
# Builds weft's images with buildah, and prints their sizes. The same commit, with the same bases, gives the same images,
# byte by byte. Variables:
#
#   PLATFORMS  linux/amd64,linux/arm64
#   PROGRAMS   whose images; fabric-controller ipam gateway route-agent
#   OUT        a folder for the images, one archive each, for `ctr --namespace k8s.io images import`; target/images
#   PUSH       registry.example.org/team: where they also go, each for all PLATFORMS under one name
#   BASES      packages: what images are built on is made of Debian's packages, for where no registry of
#              images is reached. Else BUILDER and DEBIAN are pulled, names with digests where builds are to be equal.
#   VERSIONS   a folder with base-ARCHITECTURE.packages as an earlier run left them in OUT: these versions are
#              installed; with BASES only
#   BUILT      a folder with programs for this machine's platform, in place of those compiled here
#   SOURCE_DATE_EPOCH  time of all files, the commit's by default
set -euo pipefail
cd "$(dirname "$0")/.."
PLATFORMS=${PLATFORMS:-linux/amd64,linux/arm64} OUT=${OUT:-target/images} PUSH=${PUSH:-} BASES=${BASES:-} VERSIONS=${VERSIONS:-} BUILT=${BUILT:-}
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
read -ra PROGRAMS <<<"${PROGRAMS:-fabric-controller ipam gateway route-agent}"
VERSION=$(sed -n 's/^appVersion: //p' deploy/chart/Chart.yaml)
HERE=$(dpkg --print-architecture)
HANDLERS=/proc/sys/fs/binfmt_misc
# Needs no runtime for containers.
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}

fail() { echo "images: $*" >&2; exit 1; }
step() { echo "images: $*" >&2; }

# Lets programs of another processor run here, as a small part of each build has to.
emulate() {
  local handler
  case $1 in
    "$HERE") return ;;
    amd64) handler=qemu-x86_64 ;;
    arm64) handler=qemu-aarch64 ;;
    *) fail "PLATFORMS: found \"linux/$1\", expected linux/amd64, linux/arm64 or both" ;;
  esac
  [ -e $HANDLERS/register ] || mount -t binfmt_misc binfmt_misc $HANDLERS || true
  [ -e $HANDLERS/$handler ] || update-binfmts --enable $handler || true
  [ -e $HANDLERS/$handler ] || fail "nothing runs programs for $1 here (no $HANDLERS/$handler); try PLATFORMS=linux/$HERE"
}

# Debian for an architecture, with all that goes into images, and the certificate authorities of this machine.
make_base() {
  local container packages=ca-certificates,iptables,nftables list=base-$1.packages
  step "makes localhost/debian-$1 of packages, a minute or more"
  [ -z "$VERSIONS" ] || packages=$(tr '\t\n' '=,' <"$VERSIONS/$list")
  mmdebstrap --quiet --variant=apt --architectures="$1" --components=main --include="${packages%,}" \
    --customize-hook="chroot \"\$1\" dpkg-query --show >\"$OUT/$list\"" \
    --customize-hook='copy-in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs' bookworm "$OUT/images.base.tar" \
    $(ls /etc/apt/sources.list.d/debian.sources 2>/dev/null)
  container=$(buildah from --arch "$1" scratch)
  buildah add --quiet "$container" "$OUT/images.base.tar" >/dev/null
  buildah commit --quiet --rm "$container" "localhost/debian-$1" >/dev/null
  rm "$OUT/images.base.tar"
}

# An image with the programs that are there.
take_programs() {
  local container
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$BUILT"/{fabric-controller,weft,ipam,gateway,route-agent} /programs/ >/dev/null
  buildah commit --quiet --rm "$container" localhost/weft-programs >/dev/null
}

build() {
  local program=$1 architecture=$2 file=$OUT/$1-$2.tar
  local name=localhost/weft/$program:$VERSION bases=()
  if [ -n "$BASES" ]; then
    bases=(--pull-never --build-arg "BUILDER=localhost/debian-$HERE" --build-arg "DEBIAN=localhost/debian-$architecture")
  else
    bases=(${BUILDER:+--build-arg "BUILDER=$BUILDER"} ${DEBIAN:+--build-arg "DEBIAN=$DEBIAN"})
  fi
  [ -z "$BUILT" ] || bases+=(--build-arg PROGRAMS=localhost/weft-programs)
  step "builds $program for $architecture; see $OUT/images.log"
  buildah build --quiet --layers --timestamp "$SOURCE_DATE_EPOCH" --platform "linux/$architecture" --file deploy/Dockerfile --target "$program" \
    --manifest "$name" --iidfile "$OUT/images.id" --build-arg "BUILDPLATFORM=linux/$HERE" \
    --build-arg "TARGETPLATFORM=linux/$architecture" "${bases[@]}" . >"$OUT/images.log" 2>&1 \
    || { tail "$OUT/images.log" >&2; fail "could not build $program for $architecture, see $OUT/images.log"; }
  local id; id=$(cat "$OUT/images.id")
  rm -f "$file"
  buildah push --quiet "$id" "oci-archive:$file:$name" >/dev/null
  local megabytes; megabytes=$(($(stat -c %s "$file") / 1000000))
  sizes+="$(printf '%-18s %-6s %9s, compressed %3d MB' "$program" "$architecture" \
    "$(buildah images --noheading --format "{{.Size}}" "$id")" "$megabytes")"$'\n'
}

IFS=, read -ra architectures <<<"${PLATFORMS//linux\//}"
case $BASES in "" | packages) ;; *) fail "BASES: found \"$BASES\", expected packages or nothing" ;; esac
for architecture in "${architectures[@]}"; do emulate "$architecture"; done
mkdir -p "$OUT"
if [ -n "$BASES" ]; then
  for architecture in $(printf '%s\n' "$HERE" "${architectures[@]}" | sort --unique); do make_base "$architecture"; done
fi
[ -z "$BUILT" ] || take_programs
sizes=
for program in "${PROGRAMS[@]}"; do
  buildah manifest rm "localhost/weft/$program:$VERSION" >/dev/null 2>&1 || true
  for architecture in "${architectures[@]}"; do build "$program" "$architecture"; done
  [ -z "$PUSH" ] || buildah manifest push --all "localhost/weft/$program:$VERSION" "docker://$PUSH/weft/$program:$VERSION"
done
rm "$OUT/images.id" "$OUT/images.log"
echo "$sizes"
