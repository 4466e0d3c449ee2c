#!/bin/bash
# Builds the networks of test clusters, each from its module, and takes their manifests from there.
#
#   networks.sh FOLDER FLANNEL_VERSION KUBE_ROUTER_VERSION CALICO_VERSION
set -euo pipefail
folder=$1 flannel=$2 kube_router=$3 calico=$4
# The last version of the module that has flannel's plugin: the proxy lacks the plugin's own.
plugins=0.9.1
# Of the time of that Calico.
api=v0.0.0-20240708202104-e3f70b269c2c
export CGO_ENABLED=0 GOFLAGS=-mod=mod
mkdir -p "$folder"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

is_built() { # PROGRAM MODULE [VERSION]
  [ -x "$folder/$1" ] && go version -m "$folder/$1" | grep -qF "$2	${3:+v$3}"
}

# A copy of a module's sources, which may be changed.
sources() { # NAME MODULE VERSION
  [ -d "$scratch/$1" ] && return
  mkdir -p "$scratch/of-$1"
  cd "$scratch/of-$1"
  printf 'module sources\n\ngo 1.25\n' >go.mod
  cp -r "$(go mod download -json "$2@v$3" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')" "$scratch/$1"
  chmod -R u+w "$scratch/$1"
}

# A program appears whole or not at all; its module names the version.
build() { # PROGRAM NAME MODULE VERSION PACKAGE [REPLACE]
  echo "building $1, once, a minute or two"
  mkdir -p "$scratch/build-$1"
  cd "$scratch/build-$1"
  printf 'module %s\n\ngo 1.25\n\nrequire %s v%s\n\nreplace %s => ../%s\n\n%s\n' "$1" "$3" "$4" "$3" "$2" "${6-}" >go.mod
  cp "../$2/go.sum" go.sum
  go build -trimpath -ldflags "-s -w" -o "$folder/.$1" "$3/$5"
  mv "$folder/.$1" "$folder/$1"
}

module=github.com/flannel-io/flannel
if ! is_built flanneld $module "$flannel" || ! is_built install-conf $module "$flannel"; then
  sources flannel $module "$flannel"
  # The proxy lacks a module of that cloud, and the other backend needs a C compiler.
  sed -i "/tencentvpc\\|backend\\/udp\"/d" "$scratch/flannel/main.go"
  build flanneld flannel $module "$flannel" .
  build install-conf flannel $module "$flannel" cmd/install_conf
  install -m 644 "$scratch/flannel/Documentation/kube-flannel.yml" "$folder/flannel.yaml"
fi

module=github.com/containernetworking/plugins
if ! is_built flannel $module $plugins; then
  sources plugins $module $plugins
  build flannel plugins $module $plugins plugins/meta/flannel
fi

module=github.com/cloudnativelabs/kube-router/v2
if ! is_built kube-router $module "$kube_router" || ! is_built kube-router ../kube-router-mended; then
  sources kube-router-mended $module "$kube_router"
  # Issues 1653 and 1665 of the project, solved in versions that the proxy lacks: rules name sets of IPv6 without their
  # prefix, so that no policy comes into force, and each family restores the other's sets from before.
  sed -i -E 's/"--match-set", ((src|dst)IPSetName),/"--match-set", npc.ipSetHandlers[ipFamily].Name(\1),/' \
    "$scratch/kube-router-mended/pkg/controllers/netpol/policy.go"
  sed -i '/^func parseIPSetSave/,/^}/s/^\t\tcontent := .*/&\n\t\tif len(content) > 1 \&\& strings.HasPrefix(content[1], IPv6SetPrefix+":") != ipset.isIpv6 {\n\t\t\tcontinue\n\t\t}/' \
    "$scratch/kube-router-mended/pkg/utils/ipset.go"
  build kube-router kube-router-mended $module "$kube_router" cmd/kube-router
  install -m 644 "$scratch/kube-router-mended/daemonset/generic-kuberouter.yaml" "$folder/kube-router.yaml"
fi

# Felix and the plugin of Calico and Canal. The proxy has Calico without the module of its API, which it has apart.
module=github.com/projectcalico/calico
if ! is_built calico-install $module "$calico" || [ ! -f "$folder/calico.yaml" ]; then
  sources calico $module "$calico"
  # Go 1.26 parses no IPv4 address in brackets.
  sed -i 's/\[__KUBERNETES_SERVICE_HOST__\]/__KUBERNETES_SERVICE_HOST__/' "$scratch/calico/cni-plugin/pkg/install/install.go"
  replace=$(sed -n '/^replace (/,/^)/p' "$scratch/calico/go.mod" | sed "s|=> ./api|=> github.com/projectcalico/api $api|")
  build calico-node calico $module "$calico" node/cmd/calico-node "$replace"
  build calico calico $module "$calico" cni-plugin/cmd/calico "$replace"
  build calico-install calico $module "$calico" cni-plugin/cmd/install "$replace"
  install -m 644 "$scratch/calico/manifests/canal.yaml" "$folder/canal.yaml"
  install -m 644 "$scratch/calico/manifests/calico-vxlan.yaml" "$folder/calico.yaml"
fi
