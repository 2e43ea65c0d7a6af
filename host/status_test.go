package host_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"holdfast/host"
)

func TestErrorsOfVolumeStatsReachTheCaller(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	w.plugin("a")
	if err := w.create("data", ""); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[host.VolumeName]struct {
		kind error
		says string
	}{
		{ID: "none"}:                       {host.ErrNotFound, "volume none not found"},
		{ID: "../x"}:                       {host.ErrInvalid, "volume id"},
		{Namespace: "default", ID: "data"}: {host.ErrUnsupported, "node.GET_VOLUME_STATS"},
	} {
		if usage, _, err := w.host.VolumeStats(w.ctx(), name); !errors.Is(err, c.kind) ||
			!strings.Contains(err.Error(), c.says) ||
			usage != nil {
			t.Errorf("%v: %v, %v", name, usage, err)
		}
	}
}

func TestDoctorRepairsOnlyTheNamedPlan(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	stray := filepath.Join(w.config.StateDir, "mnt", "plugin", "stage", "stray")
	must(t, os.MkdirAll(stray, 0o700))
	d, err := w.host.Doctor(w.ctx(), false, "")
	if err != nil || len(d.Findings) != 1 || d.Findings[0].Path != stray || d.Digest == "" || d.Repaired {
		t.Fatalf("%+v, %v", d, err)
	}
	if _, err := w.host.Doctor(w.ctx(), true, "another plan"); !errors.Is(err, host.ErrConflict) {
		t.Errorf("repair of another plan: %v", err)
	}
	if _, err := os.Lstat(stray); err != nil {
		t.Errorf("it was removed by another plan: %v", err)
	}
	if d, err := w.host.Doctor(w.ctx(), true, d.Digest); err != nil || !d.Repaired {
		t.Errorf("%+v, %v", d, err)
	}
	if _, err := os.Lstat(stray); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
}

func TestReadsContinueWhileWritesAreHeld(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	defer w.host.HoldWrites()()
	doctor := func(ctx context.Context, repair bool) error {
		_, err := w.host.Doctor(ctx, repair, "")
		return err
	}
	if err := doctor(w.ctx(), false); err != nil {
		t.Errorf("the doctor without repair: %v", err)
	}
	if _, _, err := w.host.VolumeStats(w.ctx(), host.VolumeName{ID: "none"}); !errors.Is(err, host.ErrNotFound) {
		t.Errorf("volume stats: %v", err)
	}
	ctx, cancel := context.WithTimeout(w.ctx(), 50*time.Millisecond)
	defer cancel()
	if err := doctor(ctx, true); !errors.Is(err, context.DeadlineExceeded) ||
		!strings.Contains(err.Error(), "being replaced") {
		t.Errorf("a repair: %v", err)
	}
}
