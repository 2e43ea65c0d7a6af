package main

import (
	"testing"

	"holdfast/host"
)

func TestUsageTexts(t *testing.T) {
	for want, u := range map[string]host.VolumeUsage{
		"5 MiB of 32 MiB (16%), 27 MiB free": {Unit: "bytes", Total: 32 << 20, Used: 5 << 20, Available: 27 << 20},
		"0 B of 1 KiB (0%), 1 KiB free":      {Unit: "bytes", Total: 1024, Available: 1024},
		"1 KiB of 1 KiB (100%), 0 B free":    {Unit: "bytes", Total: 1024, Used: 1024},
		"unknown, of 1 GiB":                  {Unit: "bytes", Total: 1 << 30},
		"11 of 1000 (1%), 989 free":          {Unit: "inodes", Total: 1000, Used: 11, Available: 989},
		"7 of 0, 0 free":                     {Unit: "unknown", Used: 7},
	} {
		if got := usageText(u); got != want {
			t.Errorf("%+v is %q, want %q", u, got, want)
		}
	}
}
