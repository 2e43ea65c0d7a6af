package disk

import (
	"os"
	"testing"

	"holdfast/internal/mount/mounttest"
)

func TestMain(m *testing.M) { os.Exit(mounttest.Run(m)) }
