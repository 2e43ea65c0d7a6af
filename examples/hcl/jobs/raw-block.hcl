# A block device in two tasks: one may write to it, the other has it read-only. The variable HOLDFAST_VOLUME_DISK says
# where it is.

job "raw-block" {
  type = "batch"

  group "copy" {
    volume "disk" {
      type            = "csi"
      source          = "disk"
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
    }

    task "write" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args = ["-c", <<-EOT
          echo "written by alloc $NOMAD_ALLOC_ID" | dd of="$HOLDFAST_VOLUME_DISK" bs=512 conv=sync,fsync
        EOT
        ]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "disk"
        destination = "/dev/disk"
      }
    }

    task "read" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args = ["-c", <<-EOT
          until dd if=/dev/disk bs=512 count=1 2>/dev/null | grep -a "written by alloc $NOMAD_ALLOC_ID"; do
            sleep 0.1
          done
          if dd if=/dev/zero of=/dev/disk bs=512 count=1; then echo "it could be written to"; exit 1; fi
        EOT
        ]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "disk"
        destination = "/dev/disk"
        read_only   = true
      }
    }
  }
}
