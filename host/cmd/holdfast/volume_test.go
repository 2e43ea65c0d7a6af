package main

import (
	"encoding/json"
	"net"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"holdfast/host/agent/control"
)

func TestShare(t *testing.T) {
	for want, u := range map[string]control.Usage{
		"5 MiB of 32 MiB (16%), 27 MiB free": {Unit: "bytes", Total: 32 << 20, Used: 5 << 20, Available: 27 << 20},
		"0 B of 1 KiB (0%), 1 KiB free":      {Unit: "bytes", Total: 1024, Available: 1024},
		"1 KiB of 1 KiB (100%), 0 B free":    {Unit: "bytes", Total: 1024, Used: 1024},
		"unknown, of 1 GiB":                  {Unit: "bytes", Total: 1 << 30},
		"11 of 1000 (1%), 989 free":          {Unit: "inodes", Total: 1000, Used: 11, Available: 989},
		"7 of 0, 0 free":                     {Unit: "unknown", Used: 7},
	} {
		if got := share(u); got != want {
			t.Errorf("%+v is %q, want %q", u, got, want)
		}
	}
}

// silent is an agent at whose socket answer is all that is said of how full a volume is.
func silent(t *testing.T, answer http.HandlerFunc) (client *control.Client, asked chan string) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	asked = make(chan string, 1)
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.URL.String()
		answer(w, r)
	})}
	served := make(chan struct{})
	go func() { defer close(served); _ = web.Serve(l) }()
	t.Cleanup(func() { _ = web.Close(); <-served })
	return control.NewClient(l.Addr().String()), asked
}

// A volume's status has how full it is, or why that is not known; it neither fails nor waits for longer than it may.
func TestStatusIsMeasured(t *testing.T) {
	for what, c := range map[string]struct {
		change     func(*control.Volume)
		answer     http.HandlerFunc
		unmeasured string
	}{
		"told": {func(*control.Volume) {}, func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode([]control.Usage{{Unit: "bytes", Total: 9}})
		}, ""},
		"not staged, published": {func(v *control.Volume) { v.Staged = "" },
			func(w http.ResponseWriter, _ *http.Request) {
				_, _ = w.Write([]byte(`[]`))
			}, "the plugin reports no usage"},
		"refused": {func(*control.Volume) {}, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusUnprocessableEntity)
			_, _ = w.Write([]byte(`{"error":"the plugin cannot say","kind":"not supported"}`))
		}, "the plugin cannot say"},
		"hangs": {func(*control.Volume) {}, func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
		}, "no answer from the agent within 2s"},
		"not mounted here": {
			func(v *control.Volume) { v.Staged, v.Holders[0].Published = "sent", "" },
			func(http.ResponseWriter, *http.Request) { t.Error("it was asked for") }, "",
		},
	} {
		client, asked := silent(t, c.answer)
		v := volume()
		v.Usage = nil
		c.change(&v)
		begin := time.Now()
		v = withUsage(t.Context(), client, v, 2*time.Second)
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("%s: took %v", what, took)
		}
		if what != "not mounted here" {
			if got := <-asked; got != "/v1/volume/data/stats?namespace=default&wait=1.8s" {
				t.Errorf("%s: asked %q", what, got)
			}
		}
		if v.Unmeasured != c.unmeasured || (len(v.Usage) > 0) != (what == "told") {
			t.Errorf("%s: %+v, %q", what, v.Usage, v.Unmeasured)
		}
	}
}
