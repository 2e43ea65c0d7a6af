# A job that writes numbers to the volume "kept", each with fsync, and to FAILED what could not be written.

job "writer" {
  group "g" {
    volume "disk" {
      type            = "csi"
      source          = "kept"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }

    task "t" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args    = ["-c", "n=0; while true; do n=$((n+1)); { echo $n >>/disk/line && sync /disk/line; } || echo $n >>FAILED; sleep 0.02; done"]
      }

      volume_mount {
        volume      = "disk"
        destination = "/disk"
      }
    }
  }
}
