package csifake

import (
	"os"
	"testing"

	"holdfast/internal/mnt/mnttest"
)

func TestMain(m *testing.M) { os.Exit(mnttest.Run(m)) }
