# Holdfast. `make help` lists every target.
SHELL := /bin/bash
GO    ?= go
BIN   := $(CURDIR)/bin
TOOLS := $(CURDIR)/.cache/bin
SOAK  ?= 10m
# Tests that take minutes in total; package e2e skips them with -short.
LONG := TestRollback$$|TestPowerCut|TestDisk|TestSwapOnAFullDisk|TestBoundedHold
LONG := $(LONG)|TestAgentKilled|TestAllKilled|TestPluginTaskKilled
# Tests that take minutes and run with -race, because many goroutines of the host change state at once.
DEATHS := TestKilledAt|ThatCannotDie|TestNoFailedCall$$/killed$$|TestRollDuringMounts|TestRollKeepsFUSEMountsAlive
DEATHS := $(DEATHS)|TestFailedRollKeeps|TestStopFirstRoll|TestFrozenNode|TestNodeIsCutOff|TestNextExecutorRepeats
# Tests with a dockerd and a podman of their own.
ENGINES := TestContainersOfEngines|TestRollKeepsFUSEMountsOfContainers
# Tests of two releases, run with the host of this release and with that of the next (see package nextrelease).
NEXT := $(CURDIR)/.cache/next.overlay.json
COMPAT := TestVersionSkew|TestVersionSkewIsSeen|TestStateOutsideTheWindow|TestStateBeyondTheWindow
COMPAT := ^($(COMPAT)|TestRollbackToTheReleaseBefore|TestSwapAddsAField|TestNewerRPCPassesTheHost)$$

# For make install and make deb. DESTDIR is a directory to install into instead of /.
PREFIX  ?= /usr/local
VERSION := $(shell sed -n 's/^const Version = "\(.*\)"/\1/p' host/start.go)
ARCH     = $(shell $(GO) env GOARCH)
TREE     = $(BIN)/tree
ZSH      = $(if $(filter /usr,$(PREFIX)),vendor-completions,site-functions)
UNITS    = $(DESTDIR)$(PREFIX)/lib/systemd/system

# Packages to test at a time.
PACKAGES ?= $(shell nproc)

# By default a program with the race detector sleeps for a second before it exits. The tests start thousands of them.
export GORACE ?= atexit_sleep_ms=0

# CSI allows 128 bytes for the path of a volume and the kernel 107 for that of a socket: tests need a short directory.
export TMPDIR := /tmp

.DEFAULT_GOAL := all
.PHONY: all help build install deb package-test python generate check-generate vet lint test compat long e2e
.PHONY: e2e-cluster engines browser sanity foreign cosanity soak demo demo-rootless bench bench-swap fuzz clean

all: build vet test ## build, vet and test

help: ## list every target
	@awk -F':.*## ' '/^[a-z][a-z0-9-]*:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build holdfast, holdfast-task, holdfast-shim and loopfs into bin/, with the shim's digest beside it
	@mkdir -p $(BIN)
	$(GO) build -o $(BIN)/holdfast ./host/cmd/holdfast
	$(GO) build -tags taskparent,netgo,osusergo -o $(BIN)/holdfast-task ./host/cmd/holdfast-task
	$(GO) build -o $(BIN)/holdfast-shim ./shim
	$(GO) build -o $(BIN)/loopfs ./examples/loopfs
	@cd $(BIN) && sha256sum holdfast-shim | cut -d' ' -f1 > holdfast-shim.sha256

install: ## install what make build has made, with manual pages, completion and a systemd unit; DESTDIR, PREFIX
	rm -rf $(BIN)/docs
	$(BIN)/holdfast docs $(BIN)/docs
	install -Dt $(DESTDIR)$(PREFIX)/bin $(BIN)/holdfast $(BIN)/holdfast-task $(BIN)/holdfast-shim $(BIN)/loopfs
	install -Dm644 -t $(DESTDIR)$(PREFIX)/share/man/man1 $(BIN)/docs/man1/*
	install -Dm644 $(BIN)/docs/holdfast.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/holdfast
	install -Dm644 -t $(DESTDIR)$(PREFIX)/share/zsh/$(ZSH) $(BIN)/docs/_holdfast
	install -Dm644 -t $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d $(BIN)/docs/holdfast.fish
	install -Dm644 -t $(DESTDIR)$(PREFIX)/share/doc/holdfast/examples examples/hcl/demo/*.hcl
	install -Dm644 LICENSE $(DESTDIR)$(PREFIX)/share/doc/holdfast/copyright
	mkdir -p $(UNITS)
	sed 's|/usr/bin/|$(PREFIX)/bin/|' packaging/holdfast.service > $(UNITS)/holdfast.service
	install -Dm644 -t $(UNITS) packaging/holdfast.socket
	test -e $(DESTDIR)/etc/holdfast/agent.hcl || install -Dm644 -t $(DESTDIR)/etc/holdfast packaging/agent.hcl
	rm -rf $(BIN)/docs

deb: ## build bin/holdfast_VERSION_ARCH.deb (needs dpkg-deb)
	rm -rf $(TREE)
	CGO_ENABLED=0 GOFLAGS="$$($(GO) env GOFLAGS) -ldflags=-s" $(MAKE) -s build
	$(MAKE) -s install DESTDIR=$(TREE) PREFIX=/usr
	install -Dt $(TREE)/DEBIAN packaging/postinst packaging/prerm packaging/postrm
	echo /etc/holdfast/agent.hcl > $(TREE)/DEBIAN/conffiles
	cd $(TREE) && find usr -type f -exec md5sum {} + > DEBIAN/md5sums
	sed "s/@VERSION@/$(VERSION)/; s/@ARCH@/$(ARCH)/; s/@SIZE@/$$(du -ks $(TREE) | cut -f1)/" packaging/control > $(TREE)/DEBIAN/control
	dpkg-deb --root-owner-group -Zgzip --build $(TREE) $(BIN)/holdfast_$(VERSION)_$(ARCH).deb > /dev/null
	rm -rf $(TREE)

package-test: ## install, upgrade, remove and purge the package below a systemd of its own, with tasks (needs root)
	$(MAKE) -s deb
	@mkdir -p $(dir $(NEXT))
	$(GO) run ./internal/nextrelease/overlay > $(NEXT).$@ && mv $(NEXT).$@ $(NEXT)
	GOFLAGS="$$($(GO) env GOFLAGS) -overlay=$(NEXT)" $(MAKE) -s deb BIN=$(CURDIR)/.cache/next VERSION=99.0.0
	.ci/package-test $(BIN)/holdfast_$(VERSION)_$(ARCH).deb $(CURDIR)/.cache/next/holdfast_99.0.0_$(ARCH).deb

demo: build ## run the demo: a plugin, a volume, a writer, a reader and a shim swap on real devices
	@BIN=$(BIN) ./examples/demo.sh

demo-rootless: build ## run the demo in a user namespace, with directories as volumes
	@BIN=$(BIN) unshare -Urm ./examples/demo.sh

python: build ## run a host in Python: a plugin, a volume, a task that writes and one that reads (needs root)
	PYTHONDONTWRITEBYTECODE=1 /usr/bin/python3 examples/python/host.py $(BIN)/holdfast-shim $(BIN)/loopfs

test: ## run all tests that take seconds, with -race; see also long, compat and bench-swap
	$(GO) test -race -short -vet=off -timeout 20m -p $(PACKAGES) ./...

compat: ## swap between this release and the next under load, with the host of either; builds bin/holdfast-shim-next
	@mkdir -p $(BIN) $(dir $(NEXT))
	$(GO) run ./internal/nextrelease/overlay > $(NEXT).$@ && mv $(NEXT).$@ $(NEXT)
	$(GO) build -overlay $(NEXT) -o $(BIN)/holdfast-shim-next ./shim
	@cd $(BIN) && sha256sum holdfast-shim-next | cut -d' ' -f1 > holdfast-shim-next.sha256
	$(GO) vet -overlay $(NEXT) ./...
	$(GO) test -timeout 20m -overlay $(NEXT) ./config ./hooks ./proto/... ./shim/internal/{store,lifecycle}
	$(GO) test -race -count=1 -timeout 20m -run '$(COMPAT)' ./e2e
	$(GO) test -race -count=1 -timeout 20m -overlay $(NEXT) -run '$(COMPAT)' ./e2e

long: ## run the tests that take minutes: failing swaps, kills in every call, power cuts, full and hanging disks
	$(GO) test -count=1 -timeout 20m -run 'TestHistories$$' ./shim/internal/node
	$(GO) test -count=1 -timeout 40m -run '$(LONG)' ./e2e
	$(GO) test -race -count=1 -timeout 40m -run '$(DEATHS)' ./e2e

e2e: ## run the end-to-end tests that take seconds
	$(GO) test -race -short -count=1 -timeout 20m ./e2e/...

e2e-cluster: ## kill, freeze and cut off nodes and members of etcd under load (needs root); ROUNDS=100, SEED repeats
	$(GO) build -C internal/etcdtest/server -o $(CURDIR)/.cache/etcd .
	cd e2e/cluster && $(GO) vet . && PATH="$(CURDIR)/.cache:$$PATH" ROUNDS=$(ROUNDS) ALLOCS=$(ALLOCS) SEED=$(SEED) \
		$(GO) test -count=1 -timeout 120m -v .

engines: ## run plugins and users of volumes in containers of a real dockerd and a real podman (needs root)
	$(GO) test -race -count=1 -timeout 20m -run '$(ENGINES)' ./e2e

browser: ## check the status page of a real agent in chromium (needs root); UPDATE=-update takes its picture again
	cd host/agent/statuspage/browser && $(GO) vet . && $(GO) test -count=1 -timeout 20m . $(UPDATE)

sanity: ## run csi-sanity against loopfs and csifake, straight and over the CSI endpoint (needs root)
	cd examples/loopfs/sanity && $(GO) vet . && $(GO) test -count=1 -timeout 20m .

foreign: ## run csi-sanity with and without the CSI endpoint, for drivers of others; HOSTPATH=PROGRAM adds one
	$(GO) build -C examples/loopfs/sanity/foreign -o $(CURDIR)/.cache/foreign/ \
		github.com/kubernetes-csi/csi-test/v4/cmd/mock-driver
	cd examples/loopfs/sanity && FOREIGN=$(CURDIR)/.cache/foreign HOSTPATH=$(HOSTPATH) \
		$(GO) test -count=1 -timeout 20m -v -run 'TestForeignDriver$$' .

cosanity: build ## run each cosanity scenario against Holdfast (needs root); builds bin/cosanity
	$(GO) build -o $(BIN)/cosanity ./internal/csifake/cmd/cosanity
	@BIN=$(BIN) ./examples/cosanity.sh $(SCENARIO)

soak: ## run 100 000 random operations in memory, then random kills of real processes for SOAK (default 10m)
	HOLDFAST_OPERATIONS=100000 $(GO) test -count=1 -timeout 0 -run 'TestHistories$$' ./shim/internal/node
	HOLDFAST_SOAK=$(SOAK) $(GO) test -count=1 -timeout 0 -run 'TestKilledAtRandomTimes$$' ./e2e

bench-swap: ## measure 1000 swaps under load (200 with SHORT=1); PLUGINS=20 EVERY=500ms is a smaller node and load
	HOLDFAST_SWAPS=$(if $(SHORT),200,1000) HOLDFAST_PLUGINS=$(PLUGINS) HOLDFAST_EVERY=$(EVERY) \
		HOLDFAST_REPORT=$(REPORT) $(GO) test -count=1 -timeout 0 -v -run 'TestSwapFigures$$' ./e2e/benchswap

bench: ## run the Go benchmarks; figures of different runs cannot be compared
	$(GO) test -run '^$$' -bench . -benchtime 200ms ./...

fuzz: ## run every fuzz target with a million inputs
	@.ci/fuzz 1000000x

vet: ## run go vet
	$(GO) vet ./...

lint: $(TOOLS)/staticcheck ## run staticcheck
	$(TOOLS)/staticcheck ./...

generate: $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc ## regenerate code and golden documents (needs protoc)
	PATH=$(TOOLS):$$PATH protoc -I proto --go_out=. --go_opt=module=holdfast \
		--go-grpc_out=. --go-grpc_opt=module=holdfast proto/holdfast/v1/*.proto
	$(GO) generate ./...

check-generate: generate ## fail if generated code differs from the committed code
	git diff --exit-code

$(TOOLS)/%: .ci/tools.mod
	@mkdir -p $(TOOLS)
	$(GO) build -modfile=.ci/tools.mod -o $@ \
		$$($(GO) list -modfile=.ci/tools.mod -f '{{.ImportPath}}' tool | grep '/$*$$')

clean: ## remove build output and caches
	rm -rf $(BIN) $(CURDIR)/.cache
