//go:build race

package testbin

var raceFlag = []string{"-race"}
