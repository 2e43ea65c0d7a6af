package hosttest_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"holdfast/host"
	"holdfast/host/hosttest"
)

// An orchestrator's test: what does it do if a volume cannot be created?
func Example() {
	shim := hosttest.New()
	defer shim.Close()
	ctx := context.Background()
	h, err := host.Open(ctx, shim.Config())
	if err != nil {
		log.Fatal(err)
	}
	defer h.Close()

	shim.Fail("Volumes/Create", host.ErrExhausted)
	_, err = h.CreateVolume(ctx, host.VolumeSpec{Namespace: "default", ID: "notes", Plugin: "disk"})
	fmt.Println(errors.Is(err, host.ErrExhausted))
	for _, c := range shim.Calls() {
		if c.Method == "Volumes/Create" {
			fmt.Println(c.Method)
		}
	}
	// Output:
	// true
	// Volumes/Create
}
