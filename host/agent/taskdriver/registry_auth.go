//go:build !taskparent

package taskdriver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/moby/moby/api/pkg/authconfig"
	engine "github.com/moby/moby/api/types/registry"

	"holdfast/internal/secretfile"
	"holdfast/registry"
)

// auth is the login of a registry.
type auth struct {
	Username      string   `json:"username"`
	Password      password `json:"password"`
	ServerAddress string   `json:"server_address"`
}

// password says where the agent reads a password before each pull. The password itself is never in the job.
type password struct{ from registry.Secret }

const passwordForms = `write password = { env = "VARIABLE" } or { file = "/path" }, which the agent reads`

func (p *password) UnmarshalJSON(b []byte) error {
	var refs blocks[struct {
		Env  string `json:"env"`
		File string `json:"file"`
	}]
	if string(b) == "null" {
		return nil
	}
	if !bytes.ContainsAny(b[:1], "{[") || json.Unmarshal(b, &refs) != nil {
		return registry.Invalid("the password must be given by reference, because a job is stored with all that it "+
			"contains; %s", passwordForms)
	}
	if len(refs) != 1 || (refs[0].Env == "") == (refs[0].File == "") {
		return registry.Invalid("the password must have one of env and file; %s", passwordForms)
	}
	p.from = registry.Secret{Env: refs[0].Env, File: refs[0].File}
	return nil
}

func (p password) read(ctx context.Context) (string, error) {
	switch {
	case p.from.File != "":
		value, err := secretfile.Read(ctx, p.from.File)
		return string(value), err
	case p.from.Env != "":
		value, set := os.LookupEnv(p.from.Env)
		if !set {
			return "", registry.Errorf(registry.ErrNotFound,
				"the agent has no environment variable %s; set it, and start the agent again", p.from.Env)
		}
		return value, nil
	}
	return "", nil
}

// header returns the login in the form of the engine's API.
func (a auth) header(ctx context.Context) (string, error) {
	value, err := a.Password.read(ctx)
	if err != nil {
		return "", fmt.Errorf("password of auth: %v", err) // no kind: the restart policy decides
	}
	return authconfig.Encode(engine.AuthConfig{Username: a.Username, Password: value, ServerAddress: a.ServerAddress})
}
