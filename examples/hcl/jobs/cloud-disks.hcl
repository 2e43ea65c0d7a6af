# One file for several regions of a cloud: a dynamic block makes an affinity per preferred zone, env holds what the
# driver reads, and a task directly in the job becomes a group of its own.

variable "zones" {
  type    = map(number)
  default = { "eu-1a" = 80, "eu-1b" = 50 }
}

job "cloud-disks" {
  datacenters = ["cloud"]

  dynamic "affinity" {
    for_each = var.zones
    iterator = zone

    content {
      attribute = "${attr.platform.aws.placement.availability-zone}"
      value     = zone.key
      weight    = zone.value
    }
  }

  meta {
    owner = "storage"
  }

  task "controller" {
    driver = "docker"
    leader = true
    user   = "nobody"

    env {
      CLOUD_ZONES  = join(",", keys(var.zones))
      CSI_ENDPOINT = "unix:///csi/csi.sock"
      NODE         = "${node.unique.name}"
    }

    config {
      image = "registry.example.net/cloud-disk-csi:2.3"
      args  = ["controller", "--zones=${join(",", keys(var.zones))}"]
    }

    csi_plugin {
      id   = "cloud-disks"
      type = "controller"

      # Never call ListVolumes, for a driver that does not survive it or takes too long. By default it is called
      # whenever the controller becomes healthy, and by "holdfast doctor". With false, doctor does not know whether the
      # volumes still exist: it says so as "skipped", and its exit code does not change.
      list_volumes = false
    }

    vault {
      policies = ["disks"]
    }

    logs {
      max_files     = 2
      max_file_size = 5
    }
  }
}
