package rpc

import (
	"os"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// Without the key, the digest of a request reveals no literal secret. It is the same for a replay at a later shim, and
// differs if a secret differs.
func TestDigestRevealsNoLiteral(t *testing.T) {
	digest := func(dir, secret string) string {
		a := &Active{Literals: NewLiterals(dir, nil, hclog.NewNullLogger())}
		req := &pb.CreateVolumeRequest{Call: &pb.Call{OperationId: "op-1"}, Spec: &pb.VolumeSpec{Id: "v",
			Secrets: map[string]*pb.Secret{"pin": {Literal: secret}, "token": {Env: "TOKEN"}}}}
		call, err := a.callOf("Volumes.Create", req)
		must(t, err)
		if req.GetSpec().GetSecrets()["pin"].GetLiteral() != secret {
			t.Error("the request has changed")
		}
		return call.Digest
	}
	dir := t.TempDir()
	first := digest(dir, "1234")
	if again := digest(dir, "1234"); again != first {
		t.Error("a replay has another digest")
	}
	if digest(dir, "1235") == first {
		t.Error("another secret has the same digest")
	}
	if digest(t.TempDir(), "1234") == first {
		t.Error("the digest needs no key")
	}
}

// The file of a literal secret stays while a volume or snapshot refers to it, or while a call is about to record it.
func TestLiteralSecretsGoWithTheirLastRecord(t *testing.T) {
	log := registrytest.NewLog(time.Now)
	l := NewLiterals(t.TempDir(), log, hclog.NewNullLogger())
	log.OnApplied(l.Applied)
	commit := func(change registry.Change) {
		t.Helper()
		for len(l.wake) > 0 {
			<-l.wake
		}
		_, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) { return change, nil })
		must(t, err)
		if len(l.wake) == 0 {
			t.Error("the change does not wake Run")
		}
		must(t, l.sweep(t.Context()))
	}
	var file string
	files := func() int {
		_, err := os.Stat(file)
		if err == nil {
			return 1
		}
		return 0
	}
	vol := registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "data", Plugin: "p", External: "x",
		Secrets: map[string]registry.Secret{"password": {Literal: "hunter2"}}}, State: registry.VolumeReady}
	spec, release, err := l.moveToFiles(vol.VolumeSpec)
	must(t, err)
	file = spec.Secrets["password"].File
	must(t, l.sweep(t.Context()))
	if files() != 1 {
		t.Error("the file was removed before its record was stored")
	}
	release()
	vol.VolumeSpec = spec
	snap := registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: "default", ID: "s",
		Secrets: vol.Secrets}, Plugin: "p", External: "y", State: registry.SnapshotReady}
	for _, step := range []struct {
		change registry.Change
		files  int
	}{
		{registry.Change{Put: []registry.Record{vol}}, 1},
		{registry.Change{Put: []registry.Record{snap}}, 1},
		{registry.Change{Delete: []registry.Key{vol.Key()}}, 1},
		{registry.Change{Delete: []registry.Key{snap.Key()}}, 0},
	} {
		if commit(step.change); files() != step.files {
			t.Errorf("%d files, want %d", files(), step.files)
		}
	}
}
