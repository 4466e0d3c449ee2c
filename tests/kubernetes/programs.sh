#!/usr/bin/env bash
# Builds what clusters of the tests run, from the Go module proxy.
# usage: programs.sh FOLDER KUBERNETES_VERSION HELM_VERSION LIQO_VERSION
set -euo pipefail
folder=$1 kubernetes=$2 helm=$3 liqoctl=$4
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl)
# Liqo's other modules: of its version, like liqoctl.
modules=(liqo-controller-manager crd-replicator webhook virtual-kubelet proxy uninstaller)
# Its own network, with VXLAN in place of Geneve, which not every kernel has.
modules+=(ipam gateway gateway/wireguard fabric-vxlan gateway/geneve-vxlan)
vxlan=$(realpath "${0%/*}")/liqo_vxlan.go
export CGO_ENABLED=0 GOFLAGS=-mod=mod

# A module of our own: the one of Kubernetes leaves the versions of its parts to its builder.
module() {
  local parts=v0.${kubernetes#1.} mod
  printf 'module kubernetes\n\ngo 1.24\n' >go.mod
  mod=$(go mod download -json "k8s.io/kubernetes@v$kubernetes" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
  printf '\nrequire k8s.io/kubernetes v%s\n\nreplace (\n' "$kubernetes" >>go.mod
  sed -n "s|^\t\(k8s.io/[a-z-]*\) v0\.0\.0\$|\t\1 => \1 $parts|p" "$mod" >>go.mod
  printf ')\n' >>go.mod
}

# A program appears whole or not at all.
build() { # NUMBER PROGRAM LINKER_FLAGS PACKAGE
  echo "building $2, once: $1 of $((${#programs[@]} + ${#modules[@]} + 2)) programs, twelve minutes in all on two cores"
  go build -trimpath -ldflags "-s -w $3" -o "$folder/.$2" "$4"
  mv "$folder/.$2" "$folder/$2"
}

is_built() { # PROGRAM MODULE VERSION
  [ -x "$folder/$1" ] && go version -m "$folder/$1" | grep -qF "$2	v$3"
}

mkdir -p "$folder"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
minor=${kubernetes#*.} minor=${minor%.*} number=0
names=k8s.io/component-base/version
for program in "${programs[@]}"; do
  number=$((number + 1))
  is_built "$program" k8s.io/kubernetes "$kubernetes" && continue
  [ -f go.mod ] || module
  build "$number" "$program" "-X $names.gitVersion=v$kubernetes -X $names.gitMajor=1 -X $names.gitMinor=$minor" \
    "k8s.io/kubernetes/cmd/$program"
done

# A program of a module that needs no more than to be named.
single() { # NUMBER PROGRAM MODULE VERSION LINKER_FLAGS PACKAGE [REPLACE]
  is_built "$2" "$3" "$4" && return
  printf 'module %s\n\ngo 1.25\n\nrequire %s v%s\n\n%s\n' "$2" "$3" "$4" "${7-}" >go.mod
  rm -f go.sum
  build "$1" "$2" "$5" "$3/$6"
}

# Helm takes a cluster that it does not see for one of this version.
flags="-X helm.sh/helm/v3/internal/version.version=v$helm"
for package in pkg/chartutil pkg/lint/rules; do
  flags+=" -X helm.sh/helm/v3/$package.k8sVersionMajor=1 -X helm.sh/helm/v3/$package.k8sVersionMinor=$minor"
done
single $((number + 1)) helm helm.sh/helm/v3 "$helm" "$flags" cmd/helm

# As its module has it.
replace='replace github.com/virtual-kubelet/virtual-kubelet => github.com/liqotech/virtual-kubelet v1.5.1-0.20241004150443-cb08879adf2f'
module=github.com/liqotech/liqo
single $((number + 2)) liqoctl $module "$liqoctl" "-X $module/pkg/liqoctl/version.LiqoctlVersion=v$liqoctl" \
  cmd/liqoctl "$replace"

# Liqo's other modules, by the checksums that Liqo has: the database of the proxy lacks one of what they need.
sources() {
  (cd "$(mktemp -d -p "$scratch")" && printf 'module sources\n\ngo 1.25\n' >go.mod &&
    go mod download -json "$module@v$liqoctl" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
}
number=$((number + 2))
for program in "${modules[@]}"; do
  number=$((number + 1)) name=liqo-${program#liqo-} name=${name//\//-}
  is_built "$name" $module "$liqoctl" && continue
  printf 'module %s\n\ngo 1.25\n\nrequire %s v%s\n\n%s\n' "$name" "$module" "$liqoctl" "$replace" >go.mod
  install -m 644 "$(sources)/go.sum" go.sum
  if [ "$program" != "${program%-vxlan}" ]; then
    [ -d with-vxlan ] || cp -r "$(sources)" with-vxlan
    chmod -R u+w with-vxlan
    install -m 644 "$vxlan" with-vxlan/pkg/utils/network/geneve/netlink.go
    printf '\nreplace %s => ./with-vxlan\n' $module >>go.mod
  fi
  build $number "$name" "" "$module/cmd/${program%-vxlan}"
done

# Its chart, with its definitions.
chart=$folder/liqo-chart-$liqoctl
if [ ! -d "$chart" ]; then
  rm -rf "$folder/.liqo-chart"
  cp -r "$(sources)/deployments/liqo" "$folder/.liqo-chart"
  chmod -R u+w "$folder/.liqo-chart"
  mv "$folder/.liqo-chart" "$chart"
fi
