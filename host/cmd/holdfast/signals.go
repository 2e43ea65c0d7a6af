package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// interrupted means that a signal has ended a command, and that no cleanup was left to do.
type interrupted struct {
	by   os.Signal
	text string // empty if it was already printed
}

func (e interrupted) Error() string {
	if e.text == "" {
		return "ended by signal: " + e.by.String()
	}
	return e.text
}

// Is reports an interruption that was already printed as errReported, so that it is not printed again.
func (e interrupted) Is(target error) bool { return target == errReported && e.text == "" }

// code returns the exit code that shells use for a program that this signal has ended.
func (e interrupted) code() int {
	if s, is := e.by.(unix.Signal); is {
		return 128 + int(s)
	}
	return exitFailed
}

// repeatable returns the function of a command that users can repeat after an interruption. The first signal ends the
// context of do. If do then fails, the error is an interrupted.
func repeatable(do func(ctx context.Context, c *cobra.Command, args []string) error) runFunc {
	return func(c *cobra.Command, args []string) error {
		ctx, stop := withSignals(c.Context())
		defer stop()
		err := do(ctx, c, args)
		if by, is := errors.AsType[interrupted](context.Cause(ctx)); is && err != nil {
			by.text = "interrupted; run the command again"
			return by
		}
		return err
	}
}

// endSignals delivers the signals that end a command, in their order. SIGHUP is one of them, unless nohup ignores it.
// Until stop is called, a write to a closed pipe returns an error instead of ending the process.
func endSignals() (received chan os.Signal, stop func()) {
	received = make(chan os.Signal, 4)
	signal.Notify(received, unix.SIGINT, unix.SIGTERM)
	if !signal.Ignored(unix.SIGHUP) {
		signal.Notify(received, unix.SIGHUP)
	}
	// SIGPIPE is received rather than ignored, because tasks and the shim would inherit that it is ignored.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, unix.SIGPIPE)
	return received, func() {
		signal.Stop(received)
		signal.Stop(pipe)
	}
}

// cancelOnSignal returns a context that ends at the first signal, with an error of type interrupted as its cause. Later
// signals stay in the channel. stop ends the context and waits for the goroutine.
func cancelOnSignal(ctx context.Context, signals <-chan os.Signal) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case s := <-signals:
			cancel(interrupted{by: s})
		case <-ctx.Done():
		}
	})
	return ctx, func() {
		cancel(nil)
		wg.Wait()
	}
}

// withSignals returns a context that ends at the first signal of endSignals.
func withSignals(ctx context.Context) (context.Context, func()) {
	signals, ignore := endSignals()
	ctx, stop := cancelOnSignal(ctx, signals)
	return ctx, func() {
		stop()
		ignore()
	}
}
