# Holdfast. `make help` lists every target.
SHELL := /bin/bash
GO    ?= go
BIN   := $(CURDIR)/bin
TOOLS := $(CURDIR)/.cache/bin
SOAK  ?= 10m
LONG := TestRollback$$|TestPowerCut|TestDisk|TestSwapOnAFullDisk|TestBoundedHold|TestSwapsOfNoisyShims
LONG := $(LONG)|TestAgentKilled|TestAllKilled|TestPluginTaskKilled|TestShimKilledUnder
# With -race, which makes them take twice as long: what is told, and to whom, while everything changes.
DEATHS := TestKilledAt|ThatCannotDie|TestNoFailedCall$$
# Tests of two releases, run with the host of this release and with that of the next (see package nextrelease).
NEXT := $(CURDIR)/.cache/next.overlay.json
COMPAT := ^(TestVersionSkew|TestVersionSkewIsSeen|TestStateOutsideTheWindow|TestStateBeyondTheWindow|TestRollbackToTheReleaseBefore|TestSwapAddsAField)$$

# How many packages are tested at a time: one more than there are processors, as tests also wait for processes and for disks.
PACKAGES ?= $(shell echo $$(($$(nproc) + 1)))

# With the race detector each process, and the tests have thousands, sleeps for a second at its end unless it is told not to.
export GORACE ?= atexit_sleep_ms=0

.DEFAULT_GOAL := all
.PHONY: all help build generate check-generate vet lint test compat long e2e sanity soak demo demo-rootless bench bench-swap fuzz clean

all: build vet test ## build, vet and test

help: ## list every target
	@awk -F':.*## ' '/^[a-z][a-z0-9-]*:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build holdfast, holdfast-shim and loopfs into bin/, with the shim's digest beside it
	@mkdir -p $(BIN)
	$(GO) build -o $(BIN)/holdfast ./host/cmd/holdfast
	$(GO) build -o $(BIN)/holdfast-shim ./shim
	$(GO) build -o $(BIN)/loopfs ./examples/loopfs
	@cd $(BIN) && sha256sum holdfast-shim | cut -d' ' -f1 > holdfast-shim.sha256

demo: build ## the main job on real parts: a plugin, a volume, a writer, a reader, a new shim meanwhile, and nothing left behind
	@BIN=$(BIN) ./examples/demo.sh

demo-rootless: build ## the same in a user namespace, on loopfs' directory backend
	@BIN=$(BIN) unshare -Urm ./examples/demo.sh

test: ## every test, with -race, but for the suites of minutes: those are long, compat and bench-swap; `make vet` is on its own
	$(GO) test -race -short -vet=off -timeout 12m -p $(PACKAGES) ./...
	$(GO) test -vet=off -run TestHistories ./shim/internal/alloc

compat: ## swap between this release and the next in turn under load, with the host of either; builds bin/holdfast-shim-next
	@mkdir -p $(BIN) $(dir $(NEXT))
	$(GO) run ./internal/nextrelease/overlay > $(NEXT)
	$(GO) build -overlay $(NEXT) -o $(BIN)/holdfast-shim-next ./shim
	@cd $(BIN) && sha256sum holdfast-shim-next | cut -d' ' -f1 > holdfast-shim-next.sha256
	$(GO) vet -overlay $(NEXT) ./...
	$(GO) test -timeout 8m -overlay $(NEXT) ./config ./hooks ./proto/... ./shim/internal/store ./shim/internal/lifecycle
	$(GO) test -race -count=1 -timeout 8m -run '$(COMPAT)' ./e2e
	$(GO) test -race -count=1 -timeout 8m -overlay $(NEXT) -run '$(COMPAT)' ./e2e

long: ## the suites of minutes: swaps that fail at each step, deaths in the middle of each call and step, power cuts, disks that are full or hang
	$(GO) test -count=1 -timeout 25m -run '$(LONG)' ./e2e
	$(GO) test -race -count=1 -timeout 25m -run '$(DEATHS)' ./e2e

e2e: ## the end-to-end scripts alone, with the real binaries
	$(GO) test -race -short -count=1 -timeout 12m ./e2e/...

sanity: ## csi-sanity against loopfs in all of its configurations, as root
	cd examples/loopfs/sanity && $(GO) vet . && $(GO) test -count=1 -timeout 5m .

soak: ## 100 000 random operations in memory, then chaos, and kills in swaps, on real processes for SOAK each (default 10m)
	HOLDFAST_OPERATIONS=100000 $(GO) test -count=1 -timeout 0 -run 'TestHistories$$' ./shim/internal/alloc
	HOLDFAST_CHAOS=$(SOAK) $(GO) test -count=1 -timeout 0 -run 'TestChaos$$|TestKilled' ./e2e

bench-swap: ## a thousand swaps under load, with their figures; 200 with SHORT=1; PLUGINS=20 EVERY=500ms for a smaller node with less to do
	HOLDFAST_SWAPS=$(if $(SHORT),200,1000) HOLDFAST_PLUGINS=$(PLUGINS) HOLDFAST_EVERY=$(EVERY) HOLDFAST_REPORT=$(REPORT) $(GO) test -count=1 -timeout 0 -v -run 'TestSwapFigures$$' ./e2e/benchswap

bench: ## Go benchmarks; compare figures within one run only
	$(GO) test -run '^$$' -bench . -benchtime 200ms ./...

fuzz: ## every fuzz target with a million inputs
	@.ci/fuzz 1000000x

vet: ## go vet
	$(GO) vet ./...

lint: $(TOOLS)/staticcheck ## staticcheck
	$(TOOLS)/staticcheck ./...

generate: $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc ## make generated code and golden documents anew (needs protoc)
	PATH=$(TOOLS):$$PATH protoc -I proto --go_out=. --go_opt=module=holdfast --go-grpc_out=. --go-grpc_opt=module=holdfast \
		proto/holdfast/v1/*.proto
	$(GO) generate ./...

check-generate: generate ## fail if generated code differs from what is committed
	git diff --exit-code

$(TOOLS)/%: .ci/tools.mod
	@mkdir -p $(TOOLS)
	$(GO) build -modfile=.ci/tools.mod -o $@ $$($(GO) list -modfile=.ci/tools.mod -f '{{.ImportPath}}' tool | grep '/$*$$')

clean: ## remove what was built
	rm -rf $(BIN) $(CURDIR)/.cache
