# The NFS driver of the Kubernetes CSI project: controller and nodes in one file.

variable "version" {
  default = "v4.11.0"
}

locals {
  image = "registry.k8s.io/sig-storage/nfsplugin:${var.version}"
  args = [
    "--endpoint=${CSI_ENDPOINT}",
    "--drivername=nfs.csi.k8s.io",
    "--nodeid=${attr.unique.hostname}",
    "--v=3",
  ]
}

job "nfs-controller" {
  datacenters = ["*"]
  type        = "service"
  priority    = 80

  update {
    max_parallel     = 1
    min_healthy_time = "10s"
    auto_revert      = true
  }

  group "controller" {
    count = 2

    constraint {
      operator = "distinct_hosts"
      value    = "true"
    }

    task "plugin" {
      driver = "docker"

      config {
        image        = local.image
        args         = local.args
        network_mode = "host"
      }

      csi_plugin {
        id   = "nfs"
        type = "controller"
      }

      resources {
        cpu        = 100
        memory     = 64
        memory_max = 128
      }
    }
  }
}
