# A task that gets a volume as a block device, next to a volume of the orchestrator's own, which Holdfast passes on
# unchanged.

job "raw-device" {
  type = "batch"

  parameterized {
    payload       = "forbidden"
    meta_required = ["target"]
  }

  group "copy" {
    volume "disk" {
      type            = "csi"
      source          = "scratch-disk"
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
    }

    volume "certs" {
      type      = "host"
      source    = "ca-certificates"
      read_only = true
    }

    task "copy" {
      driver = "docker"

      config {
        image   = "debian:13"
        command = "dd"
        args    = ["if=/dev/zero", "of=/dev/xvdb", "bs=1M", "count=64"]
      }

      volume_mount {
        volume      = "disk"
        destination = "/dev/xvdb"
      }

      volume_mount {
        volume      = "certs"
        destination = "/etc/ssl/certs"
      }
    }
  }
}
