# make demo    two clusters with the same pod CIDR talk to each other, on this machine
# make test    every test but those of `make soak`, slow suites side by side, each with what it took the last time
# make lint    format, lints and licences
# make check   lint and test; CI also runs a short soak
# make soak    what takes minutes, 90 in all: loss, memory and files over MINUTES=30 under load, other
#              WireGuards through REKEYS=3 (fewer: in fewer ways, too), floods of FLOOD=20 seconds each,
#              random lives and events in ROUNDS=200 (none: 0)
# make simulate  SEEDS=8000 simulated hours of a bad network each, or SEED=n again
# make fuzz    every fuzz target for SECONDS=60, led by coverage
# make bench   weft against wireguard-go, gotatun and boringtun, 50 minutes, into bench/RESULTS.md; QUICK=1: five
#              minutes, not written; ARGS='--line tcp-1': one line
# make bench-scale  control plane with 200 simulated nodes and 100 peerings, into bench/RESULTS.md; ARGS='--nodes 20'
# make arm64   tests of packets, plans and resources on an emulated arm64
# make install  programs and the plugin `kubectl weft`, into PREFIX=/usr/local
# make images  container images for amd64 and arm64, into target/images; PUSH=registry.example.org/team: there, too
# make chart   packs the chart for registries (OCI), into target/chart; PUSH=registry.example.org/team: there, too
# make sbom    what each program consists of, as CycloneDX, into target/sbom
# make equal-builds  builds programs and images twice and compares them byte by byte, half an hour
# make crds    writes the chart's custom resource definitions, deploy/chart/crds-*
# make clean   removes what was built and what a killed run left behind
#
# Network namespaces and devices need root; as another user, sudo is asked for.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := demo
.PHONY: demo test lint check soak soak-alone soak-aside soak-rounds simulate fuzz bench bench-scale arm64 install images chart sbom equal-builds crds clean tools lint-tools fuzz-tools \
  peers kubernetes networks previous build

CACHE  ?= $(HOME)/.cache/weft
TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),$(CURDIR)/target)
SUDO   := $(if $(filter 0,$(shell id -u)),,sudo -E env PATH=$$PATH)
export WEFT_PEERS_DIR := $(CACHE)/bin
export WEFT_PREVIOUS_DIR := $(CACHE)/previous
export WEFT_KUBERNETES_DIR ?= $(CACHE)/kubernetes/bin

CARGO_BOLERO := 0.13.5
CARGO_CYCLONEDX := 0.5.9
WIREGUARD_GO := v0.0.0-20260522210424-ecfc5a8d5446
# Whose programs run beside today's in tests of mixed versions, and whose chart is upgraded.
PREVIOUS := 988e3f08fcd08d6fff12db6ca1fd937d64fc4cc2
# Debian's containerd 1.6 goes with Kubernetes up to 1.35.
KUBERNETES := 1.34.4
HELM       := 3.19.5
LIQOCTL    := 1.2.0
# Networks under test clusters.
FLANNEL     := 0.28.10
KUBE_ROUTER := 2.1.0
# Release 3.28, as the proxy names it.
CALICO      := 1.11.0-cni-plugin.0.20250813170300-a0db560f0520
# A crate and its version, and the program in it.
CRATE_PEERS := boringtun-cli@0.7.1:boringtun-cli gotatun-cli@0.10.2:gotatun

PREFIX  ?= /usr/local
MINUTES ?= 30
SEEDS   ?= 8000
SECONDS ?= 60
FUZZ    ?= aead datagram frame train remap probe manifests
REKEYS  ?= 3
ROUNDS  ?= 200
# Of each row of the truth table on real clusters, of which the worst counts.
RUNS_OF_TABLE ?= 5
# Tests of a suite that run at a time: most of them wait.
THREADS ?= 4

# `demo`, `bench` and `test` share one release build: with other packages or targets selected, cargo would choose other
# features and compile most of what they depend on once more.
PROGRAMS = cargo build --release --locked --workspace --bins

demo: tools
	$(PROGRAMS)
	$(SUDO) $(TARGET)/release/demo $(ARGS)

# What users run is what the system tests run: the release build.
build: tools
	$(PROGRAMS)
	cargo test --locked --workspace --no-run

# A failing suite does not end the run, which takes half an hour: what failed is listed at the end, with the reasons.
test: build peers kubernetes previous
	rm -f $(SKIPPED) $(FAILURES)
	cargo test --locked --workspace --no-run --message-format=json $(ARGS) \
	  | sed -n 's|.*"manifest_path":"\([^"]*\)/Cargo.toml".*"profile":{[^}]*"test":true}.*"executable":"\([^"]*\)".*|\1 \2|p' \
	  | sort >$(TARGET)/suites
	$(SUDO) env WEFT_BIN_DIR=$(TARGET)/release WEFT_SKIPPED=$(SKIPPED) RUST_TEST_THREADS=$(THREADS) \
	  .ci/suites $(TARGET)/suites $(TARGET)/suite-times $(FAILURES) || { cat $(FAILURES); exit 1; }
	@$(SHOW_SKIPPED)

lint: tools lint-tools
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(CACHE)/bin/cargo-deny --all-features --config .deny.toml check bans licenses sources

check:
	$(MAKE) lint
	$(MAKE) test

simulate:
	$(if $(SEED),SEED=$(SEED),SEEDS=$(SEEDS)) cargo test --locked --workspace --test simulation -- --nocapture

# On stable Rust: coverage needs no nightly compiler, sanitizers would. What is found stays in the
# cache; inputs worth keeping go to the corpus, failing ones appear beside it. libFuzzer's own bookkeeping
# would take several times as long as the inputs.
fuzz: fuzz-tools
	@for target in $(FUZZ); do \
	  echo "== $$target"; mkdir -p $(CACHE)/fuzz/$$target; \
	  nice -n 19 $(CACHE)/bin/cargo-bolero bolero test $$target::$$target --package weft-fuzz --sanitizer NONE \
	    --target-dir $(TARGET)/fuzz $(if $(RUNS),--runs $(RUNS),-T $(SECONDS)s) --corpus-dir $(CACHE)/fuzz/$$target \
	    -E $(CURDIR)/tests/fuzz/__fuzz__/$$target/corpus --engine-args=-print_final_stats=1 --engine-args=-verbosity=0 \
	    --engine-args=-entropic=0 --engine-args=-reduce_inputs=0; done

soak:
	$(MAKE) soak-alone
	$(MAKE) soak-aside
	$(if $(filter-out 0,$(ROUNDS)),$(MAKE) soak-rounds)

# What is too long for CI. Of clusters nothing is skipped: a network that could not be built fails its tests.
soak-rounds: build peers networks previous
	rm -f $(SKIPPED)
	$(call TESTS,system) --nocapture --test-threads=3 $(REPEATED)
	$(call TESTS,system) --ignored --nocapture --test-threads=1 $(LONG)
	export WEFT_NO_SKIP=1; $(call TESTS,kubernetes) --ignored --nocapture
	@$(SHOW_SKIPPED)

# What measures the machine.
soak-alone: build peers
	rm -f $(SKIPPED)
	$(call TESTS,soak) --ignored --nocapture
	$(call TESTS,system) --ignored --nocapture --test-threads=1 $(ALONE)
	@$(SHOW_SKIPPED)

# What mostly waits, side by side.
soak-aside: build peers
	rm -f $(SKIPPED)
	$(call TESTS,system) --ignored --nocapture --test-threads=5 $(ALONE:%=--skip %) \
	  $(LONG:%=--skip %)
	$(SUDO) cargo test --locked --workspace --tests --config '$(KERNEL_ALONE)' -- --ignored --nocapture
	@$(SHOW_SKIPPED)

# A runner of the tests that are called kernel. By name, cargo would build these, and those of the next definition, and
# all that they need once more, with fewer features.
KERNEL_ALONE = target."cfg(unix)".runner = ["sh", "-c", "case $$0 in */kernel-*) exec \"$$0\" \"$$@\";; esac"]

# Some of the tests in the folder `tests`, as they are built.
define TESTS
program=$$(cargo test --locked --workspace --no-run 2>&1 | sed -n 's|^ *Executable $(1)/main.rs (\(.*\))$$|\1|p'); \
  program=$$(realpath "$$program"); cd tests; $(SUDO) env $(SOAK) "$$program"
endef
SOAK = WEFT_BIN_DIR=$(TARGET)/release WEFT_SKIPPED=$(SKIPPED) WEFT_MINUTES=$(MINUTES) WEFT_REKEYS=$(REKEYS) \
  WEFT_ROUNDS=$(ROUNDS) WEFT_RUNS=$(RUNS_OF_TABLE) $(if $(FLOOD),WEFT_FLOOD_SECONDS=$(FLOOD))
# Processor time, and times of less than a second.
ALONE = floods:: idle:: restarted_gateway
# Five runs of what `make test` runs once, senders of a minute, 300 peerings.
LONG = five_times for_a_minute limits::
# Tests that `make test` runs with fewer rounds.
REPEATED = lifecycle::down_restores clear_text::no_event rotation::
SKIPPED = $(TARGET)/skipped-$@
FAILURES = $(TARGET)/failures
SHOW_SKIPPED = touch $(SKIPPED); echo "$@ skipped: $$(wc -l < $(SKIPPED))"; cat $(SKIPPED)

bench: tools peers
	$(PROGRAMS)
	$(SUDO) $(TARGET)/release/bench $(if $(QUICK),--quick,--results bench/RESULTS.md) $(ARGS)

bench-scale: tools kubernetes
	$(PROGRAMS)
	$(TARGET)/release/bench scale --results bench/RESULTS.md $(ARGS)

# Of the crates that need nothing of the kernel, of which the emulator knows but a part.
arm64: tools
	@$(call INSTALL,aarch64-linux-gnu-g++:g++-aarch64-linux-gnu qemu-aarch64-static:qemu-user-static)
	rustup target add aarch64-unknown-linux-gnu
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64-static -L /usr/aarch64-linux-gnu' \
	  cargo test --locked --target aarch64-unknown-linux-gnu -p tunnel -p netplan -p fabric-primitives -p fabric-api

install: tools
	$(PROGRAMS)
	$(if $(SUDO),sudo) install -D --target-directory $(PREFIX)/bin \
	  $(addprefix $(TARGET)/release/,fabric-controller weft ipam gateway route-agent)
	$(if $(SUDO),sudo) ln -sfn weft $(PREFIX)/bin/kubectl-weft

images:
	@$(call INSTALL,buildah:buildah qemu-aarch64-static:qemu-user-static update-binfmts:binfmt-support \
	  $(if $(BASES),mmdebstrap:mmdebstrap arch-test:arch-test))
	$(SUDO) OUT=$(TARGET)/images deploy/images.sh

chart: kubernetes
	@mkdir -p $(TARGET)/chart
	$(WEFT_KUBERNETES_DIR)/helm package deploy/chart --destination $(TARGET)/chart
	$(if $(PUSH),$(WEFT_KUBERNETES_DIR)/helm push $(TARGET)/chart/weft-$$(sed -n 's/^version: //p' deploy/chart/Chart.yaml).tgz oci://$(PUSH)/charts)

# Of the last commit: the plugin writes beside each Cargo.toml.
sbom: tools
	@test -x $(CACHE)/bin/cargo-cyclonedx || { echo "building cargo-cyclonedx, once, a minute"; cargo install --quiet --locked --debug --root $(CACHE) cargo-cyclonedx@$(CARGO_CYCLONEDX); }
	@rm -rf $(TARGET)/sbom && mkdir -p $(TARGET)/sbom/source
	@git archive HEAD | tar --extract --directory $(TARGET)/sbom/source
	@cd $(TARGET)/sbom/source && $(CACHE)/bin/cargo-cyclonedx cyclonedx --quiet --format json --describe binaries
	@cd $(TARGET)/sbom && for program in fabric-controller weft ipam gateway route-agent; do \
	  sed "s|$$PWD/source|/weft|g" $$(find source -name $${program}_bin.cdx.json) >$$program.cdx.json; \
	  echo "$$PWD/$$program.cdx.json: $$(grep -c '"purl"' $$program.cdx.json) packages"; done
	@rm -rf $(TARGET)/sbom/source

equal-builds: tools
	@$(call INSTALL,buildah:buildah mmdebstrap:mmdebstrap arch-test:arch-test)
	$(SUDO) env OUT=$(TARGET)/equal-builds deploy/equal-builds.sh

crds:
	WEFT_BLESS=1 cargo test --locked --workspace --test crds files
	WEFT_BLESS=1 cargo test --locked --workspace --test chart crds::

clean:
	-$(SUDO) $(TARGET)/release/demo down
	cargo clean

# Debian's packages, installed only where a command is missing.
tools:
	@$(call INSTALL,nft:nftables ip:iproute2 ping:iputils-ping ethtool:ethtool iptables:iptables sysctl:procps cc:build-essential)

# Pairs of a command and its package.
define INSTALL
need=(); \
for pair in $(1); do \
  PATH=$$PATH:/usr/sbin:/sbin:/usr/lib/cni command -v $${pair%%:*} >/dev/null || need+=($${pair##*:}); done; \
if [ $${#need[@]} -gt 0 ]; then \
  echo "installing $${need[*]}"; \
  sudo=; [ $$(id -u) = 0 ] || sudo=sudo; \
  $$sudo apt-get update -qq; \
  $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $${need[*]} >/dev/null; fi
endef

lint-tools:
	@cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || rustup component add rustfmt clippy
	@test -x $(CACHE)/bin/cargo-deny || { echo "building cargo-deny, once, a few minutes"; cargo install --quiet --locked --debug --root $(CACHE) cargo-deny; }

fuzz-tools:
	@test -x $(CACHE)/bin/cargo-bolero || { echo "building cargo-bolero, once, a minute"; cargo install --quiet --locked --root $(CACHE) --no-default-features --features libfuzzer cargo-bolero@$(CARGO_BOLERO); }

# The other WireGuards that tests and benchmarks talk to. What cannot be built here is skipped there.
peers:
	@if [ -x $(CACHE)/bin/wireguard ]; then :; \
	elif command -v go >/dev/null; then \
	  echo "building wireguard-go, once"; \
	  GOBIN=$(CACHE)/bin go install golang.zx2c4.com/wireguard@$(WIREGUARD_GO) || echo "no wireguard-go here: what needs it is skipped"; \
	else echo "no Go here: what needs wireguard-go is skipped"; fi
	@for peer in $(CRATE_PEERS); do \
	  crate=$${peer%%:*}; program=$(CACHE)/bin/$${peer##*:}; \
	  [ -x $$program ] && grep -qsF "\"$${crate/@/ } " $(CACHE)/.crates.toml && continue; \
	  echo "building $$crate, once, a minute or two"; \
	  cargo install --quiet --locked --root $(CACHE) $$crate || echo "no $$crate here: what needs it is skipped"; done

# Programs of an earlier version.
previous: tools
	@tests/previous.sh $(PREVIOUS) $(WEFT_PREVIOUS_DIR)/$(PREVIOUS) || echo "no earlier version here: what needs it is skipped"
	@ln -sfn $(PREVIOUS) $(WEFT_PREVIOUS_DIR)/bin

# What clusters of the tests run. In WEFT_KUBERNETES_DIR may lie a Kubernetes from elsewhere.
kubernetes:
	@$(call INSTALL,etcd:etcd-server containerd:containerd runc:runc host-local:containernetworking-plugins busybox:busybox-static)
	@if [ "$$WEFT_KUBERNETES_DIR" != $(CACHE)/kubernetes/bin ]; then echo "Kubernetes from $$WEFT_KUBERNETES_DIR"; \
	elif command -v go >/dev/null; then \
	  tests/kubernetes/programs.sh $$WEFT_KUBERNETES_DIR $(KUBERNETES) $(HELM) $(LIQOCTL) || echo "no Kubernetes here: what needs it is skipped"; \
	elif [ ! -x $$WEFT_KUBERNETES_DIR/helm ]; then echo "no Go here: what needs Kubernetes is skipped"; fi

# Other people's networks under them.
networks: kubernetes
	@$(call INSTALL,ipset:ipset conntrack:conntrack)
	@if command -v go >/dev/null; then \
	  tests/kubernetes/networks.sh $$WEFT_KUBERNETES_DIR $(FLANNEL) $(KUBE_ROUTER) $(CALICO) || echo "not every network here: tests of the others fail"; \
	else echo "no Go here: tests of networks of others fail"; fi
