# Forms that job files in use are written in.
variable who_is_it {
  default = "me"
}
job "wild" { 
  datacenters = [ "*" ]
  constraint {
    attribute = node.class
    value     = "host"
  }
  group "first" {
    count = "2"
    constraint {
      distinct_hosts = true
    }
    network {
      port "open" { }
      port "p2p"     { static = 14567 }
    }
    volume "later" {
      type            = "host"
      source          = "h"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      per_alloc       = true
    }
    task "reader" {
    driver = "docker"
    volume_mount {
      volume      = "films"
      destination = "local/films"
    }
    volume_mount {
      volume      = "films"
      destination = "./srv//films/"
      read_only   = true
    }
    volume_mount {
      volume      = "films"
      destination = "${env["NOMAD_SECRETS_DIR"]}/films"
    }
    env {
      WHO    = "${var.who_is_it}"
      ON     = true
      NUMBER = 1026
#      OFF = "unused"
    }
    template {
      destination = "$${NOMAD_TASK_DIR}/conf.yaml"
      perms       = 400
      data        = <<__EOF__
node { ip = "{{ env "attr.unique.network.ip-address" }}" }
{{range $index, $service := service "mon"}}{{if gt $index 0}}, {{end}}"{{.Address}}"{{end}}
__EOF__
  }
}
    volume "films" { # after the task that uses it
      type            = "csi"
      source          = "films"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
    }
  }
  // and a plugin
  group "plugin" {
    task "plugin" {
      driver = "docker"
      csi_plugin {
        id             = "org.example-csi.nfs"
        type           = "monolith" #node" # one for both
        mount_dir      = "/csi-sock"
        stage_publish_base_dir = "/csi-data/node/nfs"
        health_timeout = "2m"
      }
      dynamic "template" {
        for_each = ["one", "two"]
        content {
          destination = "secrets/${template.value}"
          data        = <<EOF
{{ with secret "kv/${template.value}" }}{{ .Data.data.value }}{{ end }}
EOF
        }
      }
      config {
        dns  = [attr.unique.network.ip-address]
        args_of_a_shell = ["-c", <<EOH
sed -i 's/cache:11211/${CACHE}:11211/' /boot.py
"/init" "--"
        EOH
        ]
        mounts = [
          {
            type     = "tmpfs"
            readonly = false
            tmpfs_options = {
              size = 1000000 # bytes
            }
          }
        ]
        args = [ 
          "--instanceid=${attr.unique.platform.aws.instance-id}",
          "--metricsport=$${NOMAD_PORT_metrics}",
        ]
        resources {
          network {
            port "prometheus" {}
          }
        }
      }
    }
  }
} 
