package launch_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
)

// BenchmarkFirstStart copies, hashes, flushes and starts a new binary, gets one answer and ends it.
func BenchmarkFirstStart(b *testing.B) {
	for b.Loop() {
		store, _ := openStore(b)
		digest, err := store.Add(b.Context(), shared.self, shared.digest.SHA256, "")
		if err != nil {
			b.Fatal(err)
		}
		opts := options(b, "plain")
		opts.Store, opts.Digest = store, digest
		kill(b, startAnswering(b, opts))
		store.Close()
	}
}

// BenchmarkCrashRestart measures from a SIGKILL to the first answer of the next process of the binary.
func BenchmarkCrashRestart(b *testing.B) {
	opts := options(b, "plain")
	p := startAnswering(b, opts)
	for b.Loop() {
		if err := unix.Kill(p.PID(), unix.SIGKILL); err != nil {
			b.Fatal(err)
		}
		<-p.Done()
		p = startAnswering(b, opts)
	}
	kill(b, p)
}

// BenchmarkCall makes one RPC.
func BenchmarkCall(b *testing.B) {
	p := startAnswering(b, options(b, "plain"))
	for b.Loop() {
		if _, err := ask(b.Context(), p.Conn(), "echo"); err != nil {
			b.Fatal(err)
		}
	}
	kill(b, p)
}

func startAnswering(b *testing.B, opts launch.Options) *launch.Process {
	p, err := launch.Start(b.Context(), opts)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := ask(b.Context(), p.Conn(), "echo"); err != nil {
		b.Fatal(err)
	}
	return p
}
