package main

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// Without a terminal, a wait is reported at once and then every ten seconds.
func TestWaitsAreReportedNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		w := &waiter{to: &out}
		since := time.Now()
		for range 25 {
			time.Sleep(time.Second)
			w.report("volume disk\nis not created yet", since)
		}
		w.report("", since)
		want := "waiting for 1s: volume disk is not created yet\n" +
			"waiting for 11s: volume disk is not created yet\nwaiting for 21s: volume disk is not created yet\n"
		if out.String() != want {
			t.Errorf("%q, want %q", out.String(), want)
		}
	})
}
