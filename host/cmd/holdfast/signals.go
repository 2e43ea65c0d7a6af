package main

import (
	"context"
	"os"
	"os/signal"
	"sync"

	"golang.org/x/sys/unix"
)

// interrupted is the end by a signal, of a command that had nothing left to clean up.
type interrupted struct {
	by   os.Signal
	text string // empty: it has been printed
}

func (e interrupted) Error() string {
	if e.text == "" {
		return "ended by signal: " + e.by.String()
	}
	return e.text
}

// Is has an interruption that has been printed not be printed again.
func (e interrupted) Is(target error) bool { return target == errSaid && e.text == "" }

// code is the exit code of a shell for a program that a signal ended.
func (e interrupted) code() int {
	if s, is := e.by.(unix.Signal); is {
		return 128 + int(s)
	}
	return exitFailed
}

// endSignals delivers the signals that end a command in order. A closed terminal (SIGHUP) is one of them unless nohup has ignored it. Until stop is
// called, a write to a closed pipe fails and does not end the process.
func endSignals() (received chan os.Signal, stop func()) {
	received = make(chan os.Signal, 4)
	signal.Notify(received, unix.SIGINT, unix.SIGTERM)
	if !signal.Ignored(unix.SIGHUP) {
		signal.Notify(received, unix.SIGHUP)
	}
	// Not signal.Ignore: tasks and the shim would inherit that.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, unix.SIGPIPE)
	return received, func() {
		signal.Stop(received)
		signal.Stop(pipe)
	}
}

// untilSignal is ctx until the first signal, which is its cause as interrupted. stop waits for the goroutine; a signal that comes later stays in
// the channel.
func untilSignal(ctx context.Context, signals <-chan os.Signal) (_ context.Context, stop func()) {
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

// untilEndSignal is ctx until a signal ends the command.
func untilEndSignal(ctx context.Context) (context.Context, func()) {
	signals, ignore := endSignals()
	ctx, stop := untilSignal(ctx, signals)
	return ctx, func() {
		stop()
		ignore()
	}
}
