package registry

import (
	"maps"
	"testing"
)

func TestSecretNameKnowsSecretsFromTheirReferences(t *testing.T) {
	for _, name := range []string{
		"password", "PASSWORD", "passwd", "password2", "pass", "sftp-pass", "pwd", "passphrase", "secret",
		"client_secret", "clientSecret", "token",
		"csi.storage.k8s.io/serviceAccount.tokens", "sas-token", "key", "accountkey", "storage-account-key",
		"secret_access_key", "apiKey", "private-key",
	} {
		if !SecretName(name) {
			t.Errorf("%q is no secret", name)
		}
	}
	for _, name := range []string{
		"", "username", "vers", "fsType", "secret-name", "csi.storage.k8s.io/node-stage-secret-namespace", "secretfile",
		"credentials", "access_key_id",
		"tokenReview", "passive", "bypass", "monkey", "keyring", "rw", "loop",
	} {
		if SecretName(name) {
			t.Errorf("%q is a secret", name)
		}
	}
}

func TestSecretsInMountFlagsAreMasked(t *testing.T) {
	for in, want := range map[string]string{
		"":                                 "",
		"ro":                               "ro",
		"vers=4,hard":                      "vers=4,hard",
		"password=x":                       "password=***",
		"password=":                        "password=",
		"-o username=x,password=y":         "-o username=x,password=***",
		"-o username=x,password=y=z,ro":    "-o username=x,password=***,ro",
		"-o password=y -o vers=3":          "-o password=*** -o vers=3",
		`password="a,b",ro`:                `password="***",ro`,
		"password=my pass,vers=3":          "password=***,vers=3",
		"--passwd=p":                       "--passwd=***",
		"secretfile=/etc/ceph/secret":      "secretfile=/etc/ceph/secret",
		"ro\nsecret=AQBz==\nname=admin":    "ro\nsecret=***\nname=admin",
		"username=password,credentials=/c": "username=password,credentials=/c",
	} {
		if got := string(Flags(in).Masked()); got != want {
			t.Errorf("%q is shown as %q, want %q", in, got, want)
		}
	}
}

func TestVolumeShowsNoSecretOfItsMaps(t *testing.T) {
	v := Volume{VolumeSpec: VolumeSpec{
		MountFlags: "password=x", Parameters: map[string]string{"fsType": "ext4", "adminSecret": "s"},
		Context: map[string]string{"token": "t", "pool": "p"},
	}}
	got := v.Masked()
	if got.MountFlags != "password=***" || !maps.Equal(got.Parameters,
		map[string]string{"fsType": "ext4", "adminSecret": "***"}) ||
		!maps.Equal(got.Context, map[string]string{"token": "***", "pool": "p"}) {
		t.Errorf("%+v", got)
	}
	if v.Context["token"] != "t" {
		t.Error("the volume itself was changed")
	}
}
