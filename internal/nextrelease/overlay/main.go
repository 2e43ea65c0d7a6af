// Command overlay prints the go build overlay of the next release. With -update it records instead that the copies
// below e2e/testdata/next follow the files that they replace.
package main

import (
	"flag"
	"fmt"
	"os"

	"holdfast/internal/nextrelease"
)

func main() {
	update := flag.Bool("update", false, "record that the copies follow the current originals")
	flag.Parse()
	if err := run(*update); err != nil {
		fmt.Fprintln(os.Stderr, "overlay:", err)
		os.Exit(1)
	}
}

func run(update bool) error {
	if update {
		return nextrelease.Update()
	}
	text, err := nextrelease.Overlay()
	if err == nil {
		_, err = os.Stdout.Write(text)
	}
	return err
}
