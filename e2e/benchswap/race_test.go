//go:build race

package benchswap

var raceFlag = []string{"-race"}
