variable "count" { default = 3 }
job "x" {
  namespace = "prod"
  type      = "service"
  group "g" {
    count = var.count
    volume "shared" {
      type            = "csi"
      source          = "shared"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
    }
    volume "each" {
      type            = "csi"
      source          = "each"
      per_alloc       = true
      access_mode     = "single-node-single-writer"
      attachment_mode = "block-device"
    }
    volume "host" {
      type   = "host"
      source = "h"
      sticky = true
    }
    task "a" {
      driver = "docker"
      volume_mount {
        volume           = "shared"
        destination      = "/srv/shared/"
        propagation_mode = "host-to-task"
        read_only        = true
      }
      volume_mount {
        volume      = "each"
        destination = "/dev/xvdb"
      }
      volume_mount {
        volume      = "host"
        destination = "data"
      }
    }
    task "b" {
      driver = "docker"
      volume_mount {
        volume      = "shared"
        destination = "${NOMAD_ALLOC_DIR}/shared"
      }
    }
  }
}
