# democratic-csi for iSCSI: the whole configuration of the driver is a heredoc, whose key is read from a file of the
# machine when the task starts, and the socket is named in full.

job "truenas-iscsi" {
  datacenters = ["dc1"]

  group "controller" {
    task "plugin" {
      driver = "docker"

      config {
        image = "docker.io/democraticcsi/democratic-csi:v1.9.4"
        args = [
          "--csi-version=1.5.0",
          "--csi-name=org.democratic-csi.iscsi", # the id of the csi_plugin block
          "--csi-mode=controller",
          "--driver-config-file=${NOMAD_TASK_DIR}/driver.yaml",
          "--server-socket=/csi/csi.sock",
        ]
      }

      template {
        destination = "${NOMAD_TASK_DIR}/driver.yaml"
        data        = <<EOH
driver: freenas-api-iscsi
httpConnection:
  protocol: https
  host: nas.example.net
  apiKey: {{ file "/etc/holdfast/truenas-key" }}
iscsi:
  targetPortal: nas.example.net:3260
  namePrefix: csi-
EOH
      }

      csi_plugin {
        id             = "org.democratic-csi.iscsi"
        type           = "controller"
        mount_dir      = "/csi"
        health_timeout = "2m"
      }

      resources {
        cpu    = 200
        memory = 256
      }
    }
  }
}
