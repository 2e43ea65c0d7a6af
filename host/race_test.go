//go:build race

package host_test

var raceFlag = []string{"-race"}
