variable "x" {}

job "x" {
  group "uses" {
    count = 2

    volume "reader" {
      type            = "csi"
      source          = "r"
      access_mode     = "multi-node-reader-only"
      attachment_mode = "file-system"
      read_only       = var.x
    }

    volume "per-alloc" {
      type            = "csi"
      source          = "p"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      per_alloc       = var.x
    }

    task "t" {
      driver = "exec"
    }
  }

  group "twice" {
    volume "a" {
      type            = "csi"
      source          = "s"
      access_mode     = "multi-node-single-writer"
      attachment_mode = "file-system"
      read_only       = var.x
    }

    volume "b" {
      type            = "csi"
      source          = "s"
      access_mode     = "multi-node-single-writer"
      attachment_mode = "file-system"
    }

    volume "device" {
      type            = "csi"
      source          = "d"
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
    }

    task "t" {
      driver = "exec"

      volume_mount {
        volume      = "device"
        destination = "/dev/a"
        read_only   = true
      }

      volume_mount {
        volume      = "device"
        destination = "/dev/b"
        read_only   = var.x
      }
    }
  }

  group "nullable" {
    volume "inline" {
      type   = "csi"
      source = var.x

      ephemeral {
        plugin_id = "p"
      }
    }

    volume "perhaps-inline" {
      type = "csi"

      dynamic "ephemeral" {
        for_each = var.x
        content {
          plugin_id = "p"
        }
      }
    }

    volume "created" {
      type            = "csi"
      source          = "c"
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
      per_alloc       = true

      create {
        plugin_id   = "p"
        name        = var.x
        clone_id    = var.x
        snapshot_id = var.x
      }
    }

    task "t" {
      driver = "exec"

      volume_mount {
        volume      = "created"
        destination = "/dev/c"
        sub_path    = var.x
      }
    }
  }

  group "plugin" {
    task "t" {
      driver = "exec"

      csi_plugin {
        id                     = "p"
        type                   = "node"
        mount_dir              = "/local/csi/a"
        stage_publish_base_dir = var.x
      }
    }
  }

  group "dynamic" {
    dynamic "volume" {
      for_each = var.x
      labels   = [volume.value]
      content {
        type   = "host"
        source = "h"
      }
    }

    task "t" {
      driver = "exec"

      volume_mount {
        volume      = "any"
        destination = "/any"
      }
    }
  }

  group "tasks" {
    dynamic "task" {
      for_each = [1]
      labels   = [var.x]
      content {
        driver = "exec"
      }
    }
  }
}
