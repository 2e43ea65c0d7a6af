package host

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
)

// A caller whose time is up is told that, whatever was waited for; and one who has time is told what is wrong at once.
func TestTheCallersOwnTimeIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		busy := registry.Errorf(registry.ErrUnavailable, "the plugin is away")
		begun := registry.Errorf(registry.ErrUncertain, "commit under way")
		for kind, why := range map[error]error{registry.ErrUnavailable: busy, registry.ErrUncertain: begun} {
			if err := late(ctx, why); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, kind) || ctx.Err() == nil {
				t.Errorf("in time: %v", err)
			}
		}
		if err := late(t.Context(), busy); err != busy {
			t.Errorf("with time: %v", err)
		}
		if err := late(ctx, nil); err != nil {
			t.Errorf("no error: %v", err)
		}
		if wrong := registry.Invalid("no"); late(ctx, wrong) != wrong {
			t.Error("what is wrong is wrong whenever it is told")
		}
	})
}
